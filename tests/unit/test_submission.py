# SPDX-License-Identifier: Apache-2.0
"""``muster submit``: what its options make, and what it refuses before anything is made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from console.submit.command import submit
from console.submit.manifest import Form, objects, rendered
from console.submit.submission import Submission, SubmitOptions, read_submission
from rdzv.errors import ConfigError

Object = dict[str, Any]
IMAGE = "example.org/digits:1.0"
TORCHRUN = ("torchrun", "train.py")
HOROVOD = SubmitOptions(
    name="mnist",
    start="2",
    min_workers="1",
    max_workers="3",
    gpus="2",
    image="example.org/horovod:1.0",
    command=["horovodrun -np $((${workers}*${gpus})) python train.py"],
)
POD: Object = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "a", "labels": {"team": "vision"}},
    "spec": {
        "restartPolicy": "Always",
        "nodeName": "node-a",
        "containers": [
            {"name": "proxy", "image": "example.org/proxy:1"},
            {
                "name": "learner",
                "image": IMAGE,
                "args": ["torchrun", "own.py"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
            },
        ],
    },
}


def options(**given: Any) -> SubmitOptions:
    return SubmitOptions(
        **{"name": "digits", "nodes": "2:4", "image": IMAGE, "command": TORCHRUN, **given}
    )


def read(given: SubmitOptions, file: object = POD) -> Submission:
    text = file if isinstance(file, str) else json.dumps(file)
    return read_submission(given, {"HERE": "there"}, lambda _: text)


def made(given: SubmitOptions, form: Form = "Job", file: object = POD) -> list[Object]:
    """The objects, as they are read from the text that is printed."""
    text = rendered(objects(read(given, file), form, "team"))
    found: list[Object] = list(YAML(typ="safe").load_all(text))
    return found


def pod_of(given: SubmitOptions, file: object = POD) -> Object:
    (job,) = made(given, file=file)
    pod: Object = job["spec"]["template"]["spec"]
    return pod


def test_a_job_is_elastic_and_counts_only_failures() -> None:
    (job,) = made(options(gpus="8", cpu="4", memory="16Gi", volumes=["ckpt:/ckpt", "data:/d:ro"]))
    spec, template = job["spec"], job["spec"].pop("template")
    assert spec == {
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "backoffLimitPerIndex": 3,
        "maxFailedIndexes": 2,
        "successPolicy": {"rules": [{"succeededCount": 2}]},
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [143]},
                },
            ]
        },
    }
    assert job["metadata"]["namespace"] == "team"
    assert job["metadata"]["labels"]["muster.dev/job"] == "digits"
    assert template["metadata"] == {
        "labels": {"muster.dev/inject": "true"},
        "annotations": {"muster.dev/min": "2", "muster.dev/max": "4"},
    }
    assert template["spec"] == {
        "containers": [
            {
                "name": "trainer",
                "image": IMAGE,
                "command": ["torchrun", "train.py"],
                "env": [{"name": "PET_NPROC_PER_NODE", "value": "8"}],
                "volumeMounts": [
                    {"name": "ckpt", "mountPath": "/ckpt"},
                    {"name": "data", "mountPath": "/d", "readOnly": True},
                ],
                "resources": {
                    "requests": {"cpu": "4", "memory": "16Gi"},
                    "limits": {"memory": "16Gi", "nvidia.com/gpu": "8"},
                },
            }
        ],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "volumes": [
            {"name": "ckpt", "persistentVolumeClaim": {"claimName": "ckpt"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        ],
    }


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"nodes": "3"}, (3, 3, 3, 0)),
        ({"nodes": "2:8"}, (2, 8, 8, 2)),
        ({"nodes": "1:3", "start": "1"}, (1, 3, 1, 1)),
        ({"nodes": None, "start": "2"}, (1, 2, 2, 1)),
        ({"nodes": None, "start": "2", "min_workers": "2", "max_workers": "9"}, (2, 9, 2, 2)),
    ],
)
def test_sizes_by_muster_and_by_arena(given: Object, sizes: tuple[int, ...]) -> None:
    (job,) = made(options(**given))
    spec, said = job["spec"], job["spec"]["template"]["metadata"]["annotations"]
    assert spec["completions"] == spec["parallelism"]
    found = (int(said["muster.dev/min"]), int(said["muster.dev/max"]), spec["parallelism"])
    assert (*found, spec["maxFailedIndexes"]) == sizes
    # It may be scaled down to min: the API server refuses what is above completions.
    assert spec["maxFailedIndexes"] <= sizes[0]
    assert spec["successPolicy"]["rules"][0]["succeededCount"] <= spec["completions"]


def test_options_of_the_pod() -> None:
    pod = pod_of(
        options(
            env=["A=b=c", "HERE"],
            volumes=["/data/sets:/sets"],
            priority_class="low",
            tolerations=["all", "gpu=yes:NoSchedule", "spot"],
            selector=["pool=gpu"],
            service_account="trainer",
            pull_secrets=["registry"],
            working_dir="/app",
            grace="5m",
            gpus="amd.com/gpu=2",
        )
    )
    (container,) = pod["containers"]
    assert container["env"][:2] == [
        {"name": "A", "value": "b=c"},
        {"name": "HERE", "value": "there"},
    ]
    assert container["workingDir"] == "/app"
    assert container["resources"] == {"limits": {"amd.com/gpu": "2"}}
    assert pod["volumes"] == [
        {"name": "host-data-sets", "hostPath": {"path": "/data/sets", "type": "Directory"}}
    ]
    assert pod["tolerations"] == [
        {"operator": "Exists"},
        {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    names = ("priorityClassName", "serviceAccountName", "terminationGracePeriodSeconds")
    assert [pod[name] for name in names] == ["low", "trainer", 300]


def test_a_pod_from_a_file_is_completed() -> None:
    given = options(source="pod.yaml", container="learner", image=None, command=(), env=["B=3"])
    pod = pod_of(given)
    proxy, learner = pod["containers"]
    assert proxy == POD["spec"]["containers"][0]
    assert learner["args"] == ["torchrun", "own.py"]
    assert learner["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}]
    assert pod["restartPolicy"] == "Never"
    assert "nodeName" not in pod
    (job,) = made(given)
    assert job["spec"]["template"]["metadata"]["labels"]["team"] == "vision"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert rules[1]["onExitCodes"]["containerName"] == "learner"
    replaced = pod_of(options(source="pod.yaml", container="learner"))["containers"][1]
    assert (replaced["command"], "args" in replaced) == (["torchrun", "train.py"], False)


def test_processes_are_those_of_the_file_or_the_user() -> None:
    name = "PET_NPROC_PER_NODE"
    container = {"name": "c", "image": IMAGE, "env": [{"name": name, "value": "2"}]}
    file = {**POD, "spec": {"containers": [container]}}
    for given in (options(gpus="8", source="x"), options(gpus="8", env=[f"{name}=2"])):
        (container,) = pod_of(given, file)["containers"]
        assert container["env"] == [{"name": name, "value": "2"}]


def test_a_horovodrun_without_an_operator_has_a_launcher_and_workers() -> None:
    launcher, workers = made(HOROVOD, "StatefulSet")
    pods = [one["spec"]["template"] for one in (launcher, workers)]
    roles = [one["metadata"]["annotations"]["muster.dev/horovod"] for one in pods]
    assert roles == ["launcher", "worker"]
    for template in pods:
        said = template["metadata"]["annotations"]
        names = ("job", "min", "max", "slots")
        assert [said[f"muster.dev/{name}"] for name in names] == ["mnist", "1", "3", "2"]
        assert template["metadata"]["labels"]["muster.dev/inject"] == "true"
    first, second = (one["spec"]["containers"][0] for one in pods)
    assert first["command"] == ["sh", "-c", HOROVOD.command[0]]
    variables = {one["name"]: one["value"] for one in first["env"]}
    assert variables == {"workers": "2", "gpus": "2"}
    assert "resources" not in first
    assert "command" not in second
    assert second["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert launcher["spec"]["ttlSecondsAfterFinished"] > 0
    labels = pods[1]["metadata"]["labels"].items()
    assert workers["spec"]["selector"]["matchLabels"].items() <= labels


def test_a_horovodrun_with_the_operator_is_an_mpijob() -> None:
    (job,) = made(HOROVOD, "MPIJob")
    parts = job["spec"]["mpiReplicaSpecs"]
    assert {name: part["replicas"] for name, part in parts.items()} == {"Launcher": 1, "Worker": 2}
    assert parts["Worker"]["restartPolicy"] == "ExitCode"
    assert job["spec"]["slotsPerWorker"] == 2
    for part in parts.values():
        assert "restartPolicy" not in part["template"]["spec"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"name": "My_Job"},
            "use lower-case letters, digits and '-', beginning with a letter: my-job",
        ),
        ({"name": "a" * 60}, "it has 60 characters, and a job's name has 57"),
        ({"name": None}, "the job has no name: muster submit NAME"),
        ({"nodes": "4:2"}, "--nodes: '4:2' is wrong: min (4) can't exceed max (2): 2:4"),
        ({"nodes": "two"}, "expected a whole number of pods, or two, as in 2:4"),
        ({"nodes": "0:2"}, "expected 1 to 100000"),
        ({"nodes": None}, "the number of pods is missing: give --nodes MIN:MAX"),
        ({"start": "9"}, "--start is 9: choose a number from min (2) to max (4)"),
        ({"min_workers": "1"}, "say the same: give one"),
        ({"image": None}, "no image is named: give --image IMAGE, or --from FILE"),
        ({"image": "a b"}, "expected an image such as"),
        ({"command": ()}, "the command is missing: muster submit … -- torchrun train.py"),
        ({"gpus": "0"}, "leave --gpus out for a job without GPUs"),
        ({"gpus": "many"}, "--gpus: 'many' is wrong"),
        ({"gpus": "gpu=1"}, "as in amd.com/gpu=8"),
        ({"memory": "16 GB"}, "expected an amount such as 4, 500m or 16Gi"),
        ({"volumes": ["ckpt"]}, "expected CLAIM:/PATH, as in checkpoints:/checkpoints"),
        ({"volumes": ["ckpt:/c:rx"]}, "expected CLAIM:/PATH"),
        ({"volumes": ["A_b:/c"]}, "A_b is no name of a PersistentVolumeClaim"),
        ({"volumes": ["a:/c", "b:/c"]}, "--volume: /c is given twice"),
        ({"env": ["1=2"]}, "--env: '1=2' is wrong: expected NAME=VALUE"),
        ({"env": ["MISSING"]}, "as MISSING is not set here"),
        ({"tolerations": ["a:Never"]}, "with an effect of NoSchedule"),
        ({"selector": ["gpu"]}, "expected KEY=VALUE"),
        ({"labels": ["a=b c"]}, "a value has letters"),
        ({"working_dir": "app"}, "expected an absolute path"),
        ({"grace": "0s"}, "--grace: '0s' is wrong"),
        ({"sizes": "2,x"}, "--sizes: '2,x' is wrong"),
        ({"container": "c"}, "--container is for --from"),
        ({"source": "p"}, "name the one that trains by --container: proxy, learner"),
        ({"source": "p", "container": "x"}, "there is no container x; name the one"),
    ],
)
def test_what_is_wrong_is_refused(given: Object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(options(**given))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ({"apiVersion": "v1", "kind": "ConfigMap"}, "ConfigMap/? has no pods: leave it out"),
        (json.dumps(POD) + "\n---\n" + json.dumps(POD), "it has 2 pod templates"),
        ("a: [", "--from: p: line 1"),
        ({**POD, "spec": {"containers": []}}, "the pod has no container"),
        ({**POD, "spec": {"containers": "c"}}, "a list belongs there"),
        (
            {**POD, "spec": {"containers": [{"name": "c", "image": "i"}]}},
            "container c has no command: give one",
        ),
    ],
)
def test_a_file_that_has_no_pod_to_take_is_refused(file: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(options(source="p", image=None, command=()), file)
    assert said in str(refused.value)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read(options(nodes="4:2", image=None, gpus="0"))
    assert len(str(refused.value).splitlines()) == 3


def dry_run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(submit, ["digits", "--nodes=2:4", f"--image={IMAGE}", *words])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        ["torchrun", "--nnodes=2", "--node-rank=$JOB_COMPLETION_INDEX", "--master-addr=a", "t.py"],
        ["python", "-m", "torch.distributed.run", "t.py"],
        ["sh", "-c", "torchrun prepare.py && torchrun train.py"],
        ["accelerate", "launch", "--multi_gpu", "--num_machines", "2", "t.py"],
        ["python", "launch.py", "--lr", "1e-3", "-v"],
    ],
)
def test_any_launch_line_is_kept_as_it_is(line: Sequence[str]) -> None:
    status, out, err = dry_run("--dry-run", "--volume=c:/c", "--memory=1Gi", "--", *line)
    (job,) = YAML(typ="safe").load_all(out)
    assert (status, job["spec"]["template"]["spec"]["containers"][0]["command"]) == (0, list(line))
    assert ("no launcher is found in its command" in err) == (line[:2] == ["python", "launch.py"])
    assert "Muster's controller has to add the sidecar" in err


def test_a_dry_run_with_a_store_has_the_sidecar() -> None:
    store = ("--etcd-endpoints=etcd:2379", "--sidecar-image=example.org/muster-sidecar:1")
    status, out, err = dry_run("--dry-run", *store, "--", *TORCHRUN)
    (job,) = YAML(typ="safe").load_all(out)
    pod = job["spec"]["template"]["spec"]
    assert (status, [one["name"] for one in pod["initContainers"]]) == (0, ["muster"])
    assert pod["containers"][0]["command"][-3:] == ["--", *TORCHRUN]
    assert "submit added the sidecar" in err
    assert "mounts no volume that outlives its pod" in err
    assert "or save to object storage: --volume CLAIM:/PATH" in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--etcd-endpoints=e:1", "--", *TORCHRUN), "name its image by --sidecar-image"),
        (("--etcd-secret=s", "--", *TORCHRUN), "--etcd-secret is for --etcd-endpoints"),
        (("--", "deepspeed", "--num_gpus=8", "t.py"), "whose ranks meet without Muster"),
        (("--from=/nosuch", "--", *TORCHRUN), "--from: /nosuch cannot be read"),
    ],
)
def test_a_dry_run_refuses_what_cannot_train(words: Sequence[str], said: str) -> None:
    done = CliRunner().invoke(
        submit, ["digits", "--nodes=2", f"--image={IMAGE}", "--dry-run", *words]
    )
    assert said in str(done.exception)
    assert isinstance(done.exception, ConfigError)
    assert done.stdout == ""


@pytest.mark.parametrize("form", ["Job", "StatefulSet"])
def test_the_schema_of_kubernetes_takes_what_is_made(form: Form) -> None:
    import kubernetes_validate

    for one in made(HOROVOD if form == "StatefulSet" else options(gpus="8"), form):
        kubernetes_validate.validate(one, "1.36", strict=True)
