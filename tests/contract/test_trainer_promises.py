# SPDX-License-Identifier: Apache-2.0
"""What users do with a trainer, and what examples do: exact, or refused before the first step."""

from __future__ import annotations

import logging
import signal
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from muster.resuming import world_tag
from rdzv.drain.gate import Gate
from rdzv.records.drain import LastCommit
from tests.support.ports import free_ports
from tests.support.sidecars.pod_gate import PodGate
from tests.support.training.worker import ROOT, Worker, worker

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

ONCE = "never 0, once 96, more 0"
"""The 96 rows of an epoch, each trained once."""

TRANSFORMERS = [
    ("sequential", "in another order: shuffled", "in order"),
    ("group_by_length", "less padding: False", f"{ONCE}; batches kept; less padding: True"),
    ("own_sampler", "never called", "OwnSampler._get_train_sampler chooses samples"),
    ("own_loader", "never called", "OwnLoader.get_train_dataloader chooses samples"),
    ("own_loader_of_one", "never called", "trainer.get_train_dataloader chooses samples"),
    ("own_sampler_replaced", "never called", ONCE),
    ("batch_rebalance", "random order", "does not know train_sampling_strategy='batch_rebal"),
    ("rows_that_grow", "refused", "the cursor is of 80 samples in the order of seed 3, and these"),
    ("own_accumulation", "not said", f"{ONCE}; 6 steps; said"),
    ("drop_last", "96 of 96", "80 of 96"),
    ("stream", "refused", "stream it with muster.data.shard_stream"),
    ("stream_with_a_length", "an error of torch's", "stream it with muster.data.shard_stream"),
    ("save_only_model", "Adam counts 1", "save_only_model=True saves no optimizer"),
    ("save_only_model_of_steps", "Adam counts 1", "save_only_model=True saves no optimizer"),
    ("adopted", "never 41, once 46, more 9", "of step 4 was saved without MusterCallback"),
    ("adopted_and_replaced", "64 trained", "96 trained"),
    ("adopted_at_an_epochs_end", "96 never", f"{ONCE}; {ONCE}; 2.0 epochs"),
    ("bare", "144 of 800 twice in another world", "Write MusterCallback(trainer, global_batch=16)"),
    ("bare_beside_one_that_keeps_the_data", ONCE, ONCE),
    ("both_of_two", "accepted", "with steps_only=True it keeps no global_batch"),
    ("without_a_batch", "global_batch=0 is at least 1", "here global_batch=16"),
    ("own_loss", "2.00 times the step", "2.00 times the step; said"),
    ("bert", "2.00 times the step", "2.00 times the step; said"),
    ("own_loss_by_the_items_given", "the same step", "the same step"),
    ("own_mean_uneven", "0.98 times the step", "the same step"),
    ("find_batch_size", "No executable batch size found", f"{ONCE}; accumulation 4"),
]

LIGHTNING = [
    ("base", ONCE, ONCE),
    ("one_call", ONCE, ONCE),
    ("one_call_that_names_the_world", "refused", "leave out devices, num_nodes, which follow from"),
    ("not_wired", "never 48, once 0, more 48", "has another batch sampler (BatchSampler)"),
    ("sampler_of_its_own", "48 never, 48 twice", "has another batch sampler (ElasticSampler)"),
    ("two_loaders", "the other one: 48 twice", "training loader 2 of 2 begins"),
    ("manual", "32 never, 32 twice", "with manual optimization"),
    ("bare", "never 24, once 48, more 24", "MusterCallback(directory, steps_only=True)"),
    ("bare_by_name", "12 steps", "12 steps"),
    ("adopted", "never 25, once 46, more 25", "of step 3 was saved without the sampler"),
    ("adopted_at_an_epochs_end", "the same here", f"{ONCE}; {ONCE}; 12 steps"),
    ("both_of_two", "accepted", "with steps_only=True it keeps no sampler"),
    ("rows_that_grow", "refused", "Lightning counts the batches of data of one size"),
    ("own_accumulation", "not said", f"{ONCE}; 6 steps; said"),
    ("limit_of_batches", "4 steps; 64 trained", "8 steps; 128 trained; distinct (64, 64)"),
    ("limit_of_a_part", "the same here", "6 steps; 96 trained; distinct (48, 48)"),
    ("limit_of_nothing", "0 trained", "0 trained"),
    ("limit_at_an_epochs_end", "4 steps; distinct (64, 0)", "8 steps; distinct (64, 64)"),
    ("commit_before_an_epochs_end", "as undisturbed", "as undisturbed"),
    ("commit_at_an_epochs_end", "no validation and hook at 6", "as undisturbed"),
    ("commit_after_an_epochs_end", "as undisturbed", "as undisturbed"),
    ("commit_at_the_last_epochs_end", "none at 18", "as undisturbed"),
    ("commit_at_an_epochs_end_not_validated", "no hook at 6", "as undisturbed"),
    ("commit_at_an_epochs_end_rarely_validated", "no hook at 6", "as undisturbed"),
    ("commit_at_an_epochs_end_by_steps", "none at 6", "as undisturbed"),
    ("commit_where_an_epochs_schedule_steps", "none at 6", "as undisturbed"),
    ("commit_where_a_plateau_is_seen", "none at 12", "as undisturbed"),
    ("commit_before_a_plateau_is_seen", "not seen at 12", "as undisturbed"),
    ("commit_after_the_last_validation_of_an_epoch", "12 steps", "12 steps"),
    ("commit_where_training_stops_early", "none at 12", "as undisturbed"),
    ("commit_at_a_validation", "none at 2", "as undisturbed"),
    ("commit_at_a_validation_of_a_part", "none at 2", "as undisturbed"),
    ("commit_at_a_validation_of_all_batches", "none at 8", "as undisturbed"),
]

SAID = {
    "own_accumulation": "is 2 and not 4",
    "own_loss": "the loss of Labelled is a mean",
    "bert": "the loss of BertForSequenceClassification is a mean",
}
"""Cases in which something is logged, which no other case may log."""


def outcome(library: str, case: str, directory: Path, caplog: pytest.LogCaptureFixture) -> str:
    cases = import_module(f"tests.support.training.{library}_cases")
    with caplog.at_level(logging.INFO, "muster"):
        try:
            found = str((cases.CASES.get(case) or getattr(cases, case))(directory))
        except ValueError as error:
            found = str(error)
    assert "is behind" not in caplog.text, "the callback counts each step at its boundary"
    if any(said in caplog.text for said in SAID.values()):
        assert SAID[case] in caplog.text
        found += "; said"
    return found


@pytest.mark.parametrize(("case", "before", "now"), TRANSFORMERS)
def test_transformers_keeps_the_promise_or_refuses(
    case: str, before: str, now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert now in outcome("transformers", case, tmp_path, caplog), before


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("case", "before", "now"), LIGHTNING)
def test_lightning_keeps_the_promise_or_refuses(
    case: str, before: str, now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert now in outcome("lightning", case, tmp_path, caplog), before


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("library", "case", "now", "said"),
    [
        ("transformers", "bare", "3 steps", "Write MusterCallback(trainer, global_batch=16)"),
        ("transformers", "save_only_model", "Adam counts 1", "saves no optimizer"),
        ("lightning", "bare", "more 24", "MusterCallback(directory, sampler)"),
    ],
)
def test_with_muster_checks_warn_it_is_said_once_and_trained(
    library: str, case: str, now: str, said: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("MUSTER_CHECKS", "warn")
    assert now in outcome(library, case, tmp_path, caplog)
    assert 1 <= caplog.text.count(said) <= 2, "once in a life"


EXAMPLES = {"torch_steps.py": 1, "torch_digits.py": 11, "torch_dcp.py": 1}
"""And how many steps one has of what it is told to do."""
MODELS = ("torch_digits.py", "torch_dcp.py")
"""Those of them that train one."""


def training(pod: PodGate, example: str, length: int) -> AbstractContextManager[Worker]:
    """Run an example as the only worker of the round that the pod's gate is of."""
    option = "--epochs" if EXAMPLES[example] > 1 else "--steps"
    return worker(
        ROOT / "examples" / example,
        "--step-ms=20",
        f"{option}={length}",
        run_dir=pod.run_dir,
        master=pod.gate.master,
        CHECKPOINT_DIR=str(pod.run_dir / "shared"),
        RANK="0",
        WORLD_SIZE="1",
    )


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_goes_on_from_the_step_that_all_have_saved(tmp_path: Path, example: str) -> None:
    rounds = [f"127.0.0.1:{port}" for port in free_ports(2)]
    pod = PodGate(tmp_path, rounds[0])
    idle = Gate(run="job", round=0, master=rounds[0])
    pod.show(idle)
    # So long that it does not end by itself.
    with training(pod, example, 1_000_000) as rank:
        pod.until(lambda told: told.step >= 3)
        pod.show(replace(idle, epoch=1, phase="hold"))
        pod.until(lambda told: told.held)
        step = pod.told().step + 2
        pod.show(replace(idle, epoch=1, phase="commit", step=step))
        pod.until(lambda told: told.acked == (1, step))
        tag = pod.told().tag
        assert rank.terminate() == -signal.SIGTERM
    assert tag == world_tag("job", 0, rounds[0])
    last = LastCommit(step, 0, 1, tag=tag)
    pod.show(replace(idle, round=1, master=rounds[1], epoch=1, last_commit=last))
    with training(pod, example, (step + 80) // EXAMPLES[example]) as rank:
        assert rank.end() == 0, rank.complaints
    assert f"starts at step {step}\n" in rank.said


@pytest.mark.parametrize("former", [True, False])
@pytest.mark.parametrize(
    "example", ["torch_steps.py", *(pytest.param(one, marks=pytest.mark.long) for one in MODELS)]
)
def test_an_example_that_finds_an_empty_directory_trains_in_a_new_life_alone(
    tmp_path: Path, example: str, former: bool
) -> None:
    (port,) = free_ports(1)
    pod = PodGate(tmp_path, f"127.0.0.1:{port}")
    last = LastCommit(60, 0, 1)
    pod.show(Gate(run="job", master=pod.master, last_commit=last, of_former_life=former))
    with training(pod, example, 1) as rank:
        status = rank.end()
    if former:
        assert status == 0, rank.complaints
        assert "starts at step 0\n" in rank.said
    else:
        # torch sometimes aborts where an error ends a process that has a group.
        assert status != 0, rank.said
        (line,) = [one for one in rank.complaints.splitlines() if "CheckpointMissing: " in one]
        assert "all ranks of this job have saved step 60" in line
        assert "or run `muster forget`" in line
