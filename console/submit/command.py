# SPDX-License-Identifier: Apache-2.0
"""``muster submit``: makes a training job in the cluster, follows it, and ends as it does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from ruamel.yaml import YAML

from agent.telemetry.logs import printable
from console.help import Command
from console.remote.pods import ClusterOptions, cluster, through_the_api_server
from console.styling import remark, wrapped
from console.submit.following import Followed, Outputs, follow
from console.submit.manifest import (
    Form,
    ManifestObject,
    called,
    create,
    gets_sidecar,
    has_mpi_jobs,
    objects,
    path_of,
    refuse_taken,
    rendered,
)
from console.submit.submission import GRACE_S, RETRIES, Submission, SubmitOptions, read_submission
from controller.cluster.api import ClusterApi
from injection.injection import Request, inject
from injection.settings import TABLE
from launcher_shim.exit_status import EXIT_DONE, EXIT_INTERRUPTED
from launcher_shim.pod.launchers import CENTRAL
from rdzv.errors import ClusterError, ConfigError
from rdzv.sentences import counted

_OF_SIDECAR = (
    *("etcd_endpoints", "etcd_secret", "etcd_secret_keys", "image"),
    *("pull_policy", "pull_secrets", "resources", "user"),
)
"""The settings of injection that a variable may give: those of the sidecar, not of the job."""
_HELPS = {
    "mounts no volume that outlives its pod": ": --volume CLAIM:/PATH",
    "no container asks for CPU or memory": ": give --cpu and --memory",
}
"""Parts of remarks, and the options of submit that help."""
_UNKNOWN_STORE = {"etcd_endpoints": "etcd:2379", "image": "muster-sidecar"}
"""Stand for what the controller knows, where its plan is only looked at for faults."""


@dataclass(frozen=True, slots=True)
class NamedStore:
    """The store of a job whose sidecar submit adds itself, and that sidecar's image."""

    endpoints: str
    image: str | None = None
    secret: str | None = None


@click.command(
    "submit",
    cls=Command,
    statuses={
        0: "the job is complete; with -d or --dry-run: it is made, or printed",
        1: "the job has failed, and no container says how; else the failed container's status",
        66: "the job was deleted while it was followed",
        69: "the API server refuses, or does not answer",
        130: "ended by Ctrl-C: the job goes on",
    },
    context_settings={"allow_interspersed_args": True, "show_default": True},
    epilog=f"""\
The pods are those of an Indexed Job; for {CENTRAL.name} they are those of an MPIJob, if the
cluster has this kind, else of a Job for the launcher and a StatefulSet for its workers.

A command of one word with blanks is run by sh -c. It may use Arena's variables workers, minWorkers,
maxWorkers and gpus.

\b
Examples:
  muster submit digits --nodes 2:4 --gpus 8 --image example.org/digits:1.0 \\
      --volume checkpoints:/checkpoints -- torchrun train.py
  muster submit digits --nodes 2:4 --from pod.yaml --dry-run
  muster submit --name=mnist --workers=2 --min-workers=1 --max-workers=3 \\
      --image example.org/{CENTRAL.library.lower()}:1.0 "{CENTRAL.name} python train.py"
""",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="NAME -- COMMAND…")
@click.option("--name", metavar="NAME", help="Name of the job, in place of the argument.")
@click.option(
    "--nodes", metavar="MIN:MAX", help="Fewest and most pods that train; one number: both."
)
@click.option(
    "--start",
    "--workers",
    metavar="N",
    show_default="max",
    help="Pods at the start; muster scaleout adds more.",
)
@click.option("--min-workers", metavar="N", help="Arena's word for the MIN of --nodes.")
@click.option("--max-workers", metavar="N", help="Arena's word for the MAX of --nodes.")
@click.option("--sizes", metavar="N,…", help="Numbers of pods that may train together.")
@click.option(
    "--gpus",
    metavar="[RESOURCE=]N",
    help="GPUs of each pod, and processes of torchrun; nvidia.com/gpu unless a resource is named.",
)
@click.option("--cpu", metavar="AMOUNT", help="CPUs that each pod requests.")
@click.option("--memory", metavar="AMOUNT", help="Memory that each pod requests and may use.")
@click.option("--image", metavar="IMAGE", help="Image of the container that trains.")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Take the pod from this YAML: a Pod, or what makes pods. Options change it.",
)
@click.option("--container", metavar="NAME", help="With --from: the container that trains.")
@click.option(
    "--volume",
    "--data",
    "volumes",
    multiple=True,
    metavar="CLAIM:/PATH[:ro]",
    help="Mount a PersistentVolumeClaim, or a folder of the node by its path. Checkpoints belong on"
    " one that all pods share; may be given again.",
)
@click.option(
    "-e",
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable; without a value as it is here; may be given again.",
)
@click.option("--working-dir", metavar="DIR", help="Working directory of the command.")
@click.option("--priority-class", "--priority", metavar="NAME", help="PriorityClass of the pods.")
@click.option(
    "--toleration",
    "tolerations",
    multiple=True,
    metavar="KEY[=VALUE][:EFFECT]",
    help="Tolerate a taint of nodes; all: every taint; may be given again.",
)
@click.option(
    "--selector", multiple=True, metavar="KEY=VALUE", help="Run on nodes with this label alone."
)
@click.option("--service-account", metavar="NAME", help="ServiceAccount of the pods.")
@click.option(
    "--image-pull-secret",
    "pull_secrets",
    multiple=True,
    metavar="NAME",
    help="Secret to pull the image with; may be given again.",
)
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label the job and its pods."
)
@click.option(
    "--grace",
    metavar="TIME",
    show_default=f"{GRACE_S}s",
    help="How long a pod has for its save when it has to go.",
)
@click.option(
    "--retries",
    metavar="N",
    show_default=str(RETRIES),
    help="How often a pod that fails is made again. Drained and evicted pods always are.",
)
@click.option(
    "--etcd-endpoints",
    metavar="HOST:PORT,…",
    help="Without Muster's controller: add the sidecar here, with this store.",
)
@click.option(
    "--etcd-secret", metavar="NAME", help="With --etcd-endpoints: Secret with what etcd asks for."
)
@click.option(
    "--sidecar-image",
    metavar="IMAGE",
    envvar="MUSTER_IMAGE",
    show_envvar=True,
    help="With --etcd-endpoints: image of the sidecar.",
)
@click.option("-d", "--detach", is_flag=True, help="Don't follow the job.")
@click.option("--dry-run", is_flag=True, help="Print the manifest, and make nothing.")
@through_the_api_server
def submit(
    options: ClusterOptions,
    words: Sequence[str],
    detach: bool,
    dry_run: bool,
    etcd_endpoints: str | None,
    etcd_secret: str | None,
    sidecar_image: str | None,
    name: str | None,
    **given: Any,
) -> int:
    """Train in the cluster: make a job of COMMAND, follow it, and end as it does.

    Between MIN and MAX pods train, and no step is lost when pods come and go. Muster's controller
    adds the sidecar to the pods; in a cluster without it, submit does, with --etcd-endpoints.

    Ctrl-C leaves the job running.
    """
    if name is None and words:
        name, *rest = words
        words = rest
    asked = SubmitOptions(name=name, command=tuple(words), **given)
    job = read_submission(asked, os.environ, _text_of)
    store = _store(etcd_endpoints, sidecar_image, etcd_secret)
    if dry_run:
        form: Form = "StatefulSet" if job.central else "Job"
        text = planned(objects(job, form, options.namespace), store)
        sys.stdout.buffer.write(text.encode())
        by = "submit added the sidecar" if store else "Muster's controller has to add the sidecar"
        _say(f"nothing is made; {by}")
        return EXIT_DONE
    followed: list[Followed] = []
    try:
        return asyncio.run(submit_job(options, job, followed, store=store, detach=detach))
    except KeyboardInterrupt:
        if not followed:
            raise
        where = f" -n {followed[0].namespace}"
        _say(
            f"job {job.name} goes on: muster logs {job.name}{where} -f follows it again, muster"
            f" delete {job.name}{where} ends it"
        )
        return EXIT_INTERRUPTED


async def submit_job(
    options: ClusterOptions,
    job: Submission,
    followed: list[Followed],
    *,
    store: NamedStore | None,
    detach: bool,
) -> int:
    """Make the job and follow it; return its exit status. ``followed`` gets it once it is made."""
    async with cluster(options) as api:
        namespace = api.namespace
        form: Form = "Job"
        if job.central:
            form = "MPIJob" if await has_mpi_jobs(api) else "StatefulSet"
        made = objects(job, form, namespace)
        ready = await asyncio.to_thread(_read_again, made, store)
        await refuse_taken(api, namespace, job.name, made)
        how = await _who_adds(api, namespace, job, made, store)
        await create(api, namespace, ready)
        followed.append(_followed(job, form, namespace, made[0]))
        for line in summary(job, form, namespace, how):
            click.echo(line)
        if detach:
            return EXIT_DONE
        status = await follow(api, followed[0], Outputs(click.echo, _say))
        for workers in made[1:]:
            await _dismiss(api, namespace, job.name, workers)
        return status


async def _dismiss(api: ClusterApi, namespace: str, job: str, workers: ManifestObject) -> None:
    """Delete the workers of a launcher that has ended; the exit status stays the job's."""
    try:
        await api.delete(path_of(workers, namespace))
    except ClusterError as error:
        _say(f"{error}; muster delete {job} -n {namespace} removes {called(workers)}")
        return
    _say(f"deleted {called(workers)}, which would wait for another launcher")


def planned(made: Sequence[ManifestObject], store: NamedStore | None) -> str:
    """Return the objects as YAML, with the sidecar if ``store`` is given; print warnings.

    Raises ``ConfigError`` if the job would train without Muster.
    """
    text = rendered(made)
    flags: Mapping[str, str | None] = _UNKNOWN_STORE
    environ: Mapping[str, str] = {}
    if store is not None:
        flags = {
            "etcd_endpoints": store.endpoints,
            "etcd_secret": store.secret,
            "image": store.image,
        }
        variables = {TABLE[name].variable for name in _OF_SIDECAR}
        environ = {name: text for name, text in os.environ.items() if name in variables}
    outcome = inject(text, Request(flags, environ, ("*",)))
    # What holds for a central launcher's workers is that they are restarted, which is meant.
    first = f"{made[0]['kind']}/{made[0]['metadata']['name']}: "
    ours = [str(one) for one in outcome.notes if one.level == "warning" and one.startswith(first)]
    for sentence in dict.fromkeys(map(_in_words_of_submit, ours)):
        remark("warning", sentence)
    return outcome.text if store is not None else text


def _read_again(made: Sequence[ManifestObject], store: NamedStore | None) -> list[ManifestObject]:
    return list(YAML(typ="safe").load_all(planned(made, store)))


def _in_words_of_submit(note: str) -> str:
    """Return a remark of the plan without its object, and with the option that helps."""
    _, _, sentence = note.partition(": ")
    helps = next((option for part, option in _HELPS.items() if part in sentence), "")
    return sentence + helps


async def _who_adds(
    api: ClusterApi,
    namespace: str,
    job: Submission,
    made: Sequence[ManifestObject],
    store: NamedStore | None,
) -> str:
    """Return a sentence about who adds the sidecar; raises ``ConfigError`` if nobody does."""
    if store is not None:
        return f"submit added the sidecar, with the store at {store.endpoints}"
    spec = made[0]["spec"]
    template = spec.get("template") or spec["mpiReplicaSpecs"]["Launcher"]["template"]
    added = await gets_sidecar(api, namespace, job.name, template)
    if added is None:
        return "the cluster's controller adds the sidecar, which could not be tried here"
    if not added:
        raise ConfigError(
            f"no controller of Muster adds sidecars in namespace {namespace}: install the chart"
            " (docs/controller.md), or name a store by --etcd-endpoints and the sidecar's image by"
            " --sidecar-image, and submit adds it"
        )
    return "the cluster's controller adds the sidecar"


def summary(job: Submission, form: Form, namespace: str, how: str) -> list[str]:
    """Return three lines: what was made, how to watch it, how to stop it."""
    kinds = {"Job": "Job", "MPIJob": "MPIJob", "StatefulSet": "Job and StatefulSet"}
    gpus = f" of {counted(job.gpus[1], 'GPU')}" if job.gpus else ""
    trains = f"{job.least}" if job.least == job.most else f"{job.least} to {job.most}"
    where = f"{job.name} -n {namespace}"
    return [
        f"made   {kinds[form]} {job.name}: {counted(job.start, 'pod')}{gpus}, {trains} train;"
        f" {how}",
        f"watch  muster get {where} -w, muster logs {where} -f",
        f"stop   muster delete {where} (saves first)",
    ]


def _followed(job: Submission, form: Form, namespace: str, owner: ManifestObject) -> Followed:
    container = str(job.template.container.get("name"))
    selector = f"batch.kubernetes.io/job-name={job.name}"
    if form == "MPIJob":
        of_launcher = "training.kubeflow.org/replica-type=launcher"
        selector = f"training.kubeflow.org/job-name={job.name},{of_launcher}"
    return Followed(job.name, namespace, path_of(owner, namespace), selector, container)


def _store(endpoints: str | None, image: str | None, secret: str | None) -> NamedStore | None:
    if endpoints is None:
        if secret is not None:
            raise ConfigError("--etcd-secret is for --etcd-endpoints: give both, or neither")
        return None
    if not image:
        raise ConfigError(
            "--etcd-endpoints: submit adds the sidecar itself: name its image by --sidecar-image"
        )
    return NamedStore(endpoints, image, secret)


def _text_of(file: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode()
    except OSError as error:
        raise ConfigError(f"--from: {file} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--from: {file} is no UTF-8 text: save it as UTF-8") from error


def _say(sentence: str) -> None:
    for line in sentence.splitlines():
        text = f"muster: {printable(line)}"
        click.echo(wrapped(text, sys.stderr, len("muster: ")), err=True)
