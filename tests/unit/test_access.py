# SPDX-License-Identifier: Apache-2.0
"""How the store is reached: every fault in one sentence, and no secret in any."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from agent.config import Config
from agent.job_config import JobConfig
from console.local.launch_line import LaunchLine
from console.local.settings import LocalSettings, Pod, sidecar_environment
from rdzv.errors import ConfigError, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.records.policy import JobPolicy
from rdzv.settings import load
from rdzv.store import Put, access
from rdzv.store.access import Access, Certificates, read_certificates, read_password
from rdzv.store.etcd import credentials
from rdzv.store.etcd.admin import JobRole
from rdzv.store.etcd.client import EtcdStore, open_store
from rdzv.store.etcd.credentials import CertificateFiles
from tests.support.store.certificates import Authority, write

PLAIN = ("10.0.0.1:2379",)
TLS = ("https://etcd-0:2379", "https://etcd-1:2379")
SECRET = "hunter2-is-secret"

DEADLINE_S = 60.0
"""Ends what hangs."""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"endpoints": ()}, "give at least one host:port in --etcd-endpoints"),
        ({"endpoints": ("etcd",)}, "'etcd' is not of the form host:port"),
        ({"endpoints": (*PLAIN, *TLS)}, "write all alike in --etcd-endpoints"),
        ({"endpoints": TLS}, "--etcd-cacert (MUSTER_ETCD_CACERT) is missing"),
        ({"cacert": "ca"}, "write https://host:port in --etcd-endpoints"),
        ({"cert": "c", "key": "k"}, "--etcd-cert (MUSTER_ETCD_CERT) is given, but"),
        (
            {"endpoints": TLS, "cacert": "ca", "cert": "c"},
            "--etcd-cert (MUSTER_ETCD_CERT) is given without --etcd-key (MUSTER_ETCD_KEY)",
        ),
        (
            {"endpoints": TLS, "cacert": "ca", "key": "k"},
            "--etcd-key (MUSTER_ETCD_KEY) is given without --etcd-cert (MUSTER_ETCD_CERT)",
        ),
        ({"user": "u"}, "--etcd-user (MUSTER_ETCD_USER) is given without --etcd-password-file"),
        ({"password_file": "f"}, "is given without --etcd-user (MUSTER_ETCD_USER)"),
        ({"user": f"u:{SECRET}", "password_file": "f"}, "has a colon in it"),
        ({"endpoints": (f"https://u:{SECRET}@etcd:2379",)}, "holds a user name or a password"),
        ({"endpoints": (f"{SECRET}@etcd:2379",)}, "holds a user name or a password"),
    ],
)
def test_a_fault_is_one_sentence_that_says_what_to_do(given: dict[str, object], told: str) -> None:
    fields: dict[str, object] = {"endpoints": PLAIN, **given}
    with pytest.raises(ConfigError) as caught:
        Access(**fields)  # type: ignore[arg-type]
    assert any(told in line for line in str(caught.value).splitlines()), caught.value
    assert SECRET not in str(caught.value)


def test_what_it_shows_of_itself_names_no_secret_and_no_place_of_one() -> None:
    access = Access(TLS, "/ca", "/cert", "/key-file", "somebody", f"/{SECRET}")
    for hidden in (SECRET, "somebody", "key-file"):
        assert hidden not in repr(access)
    assert access.targets == ("etcd-0:2379", "etcd-1:2379")
    assert access.tls
    assert not Access(PLAIN).tls


@pytest.fixture
def files(tmp_path: Path) -> Access:
    """Access by a client certificate that is there."""
    authority = Authority(tmp_path)
    cert, key = authority.client("somebody")
    return Access(TLS, str(authority.cacert), str(cert), str(key))


def test_good_files_have_no_fault(files: Access, tmp_path: Path) -> None:
    path = tmp_path / "password"
    write(path, f" {SECRET} \r\n".encode())
    whole = replace(files, user="u", password_file=str(path))
    assert list(whole.file_faults()) == []
    assert read_password(whole) == f" {SECRET} "
    found = read_certificates(files)
    assert b"BEGIN PRIVATE KEY" in (found.key or b"")
    assert "BEGIN" not in repr(found)


def rotated_amid_the_check(
    files: Access, monkeypatch: pytest.MonkeyPatch, rotate: Callable[[], None]
) -> None:
    """Let ``rotate`` happen after the files were read, and before they are checked."""
    check = access._context_of

    def checked(given: Access) -> ssl.SSLContext:
        rotate()
        return check(given)

    monkeypatch.setattr(access, "_context_of", checked)


def test_a_pair_is_checked_as_it_was_read(files: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is new already when all is read, and the certificate when all is checked."""
    cert, key = fresh_certificate(files)
    write(Path(files.key), key)
    rotated_amid_the_check(files, monkeypatch, lambda: write(Path(files.cert), cert))
    found = read_certificates(files)
    assert (found.cert, found.key) == (cert, key)


def test_files_that_keep_changing_are_told(files: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    cert = Path(files.cert)
    rotated_amid_the_check(files, monkeypatch, lambda: write(cert, cert.read_bytes() + b"\n"))
    with pytest.raises(ConfigError, match="keep changing while they are read"):
        read_certificates(files)


def without(path: str) -> None:
    Path(path).unlink()


def emptied(path: str) -> None:
    Path(path).write_text("")


def encrypted(path: str) -> None:
    key = serialization.load_pem_private_key(Path(path).read_bytes(), None)
    content = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(SECRET.encode()),
    )
    Path(path).write_bytes(content)


def anothers(path: str) -> None:
    folder = Path(path).parent / "other"
    folder.mkdir()
    Authority(folder).client("other")[1].replace(path)


@pytest.mark.parametrize(
    ("which", "spoil", "told"),
    [
        ("cacert", without, "of --etcd-cacert (MUSTER_ETCD_CACERT) cannot be read (No such file"),
        ("cacert", emptied, "holds no certificate in PEM form"),
        ("cert", without, "of --etcd-cert (MUSTER_ETCD_CERT) cannot be read"),
        ("cert", emptied, "are no certificate and unencrypted key"),
        ("key", without, "of --etcd-key (MUSTER_ETCD_KEY) cannot be read"),
        ("key", encrypted, "are no certificate and unencrypted key"),
        ("key", anothers, "do not belong together"),
    ],
)
def test_a_file_that_will_not_do_is_told(
    files: Access, which: str, spoil: Callable[[str], None], told: str
) -> None:
    path = getattr(files, which)
    spoil(path)
    (sentence,) = files.file_faults()
    assert told in sentence
    assert path in sentence


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read (No such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff\xfe", "it is not text"),
        (b"x" * 73, "longer than 72 bytes"),
    ],
)
def test_a_password_file_that_will_not_do_is_told_without_its_name(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    """Its name may be the password, given in the place of the file."""
    path = tmp_path / SECRET
    if content is not None:
        path.write_bytes(content)
    access = Access(PLAIN, user="u", password_file=str(path))
    (sentence,) = access.file_faults()
    assert told in sentence
    assert "--etcd-password-file (MUSTER_ETCD_PASSWORD_FILE)" in sentence
    assert SECRET not in sentence


def test_the_settings_make_it_and_tell_its_faults_with_all_others(
    files: Access, tmp_path: Path
) -> None:
    environ = {
        "MUSTER_JOB": "digits",
        "MUSTER_ETCD_ENDPOINTS": ",".join(TLS),
        "MUSTER_ETCD_CACERT": files.cacert,
        "MUSTER_ETCD_CERT": files.cert,
        "MUSTER_ETCD_KEY": files.key,
        "MUSTER_STORE_DRIVER": "etcd3",
    }
    assert load(JobConfig, {}, environ).access == replace(files, driver="etcd3")
    environ |= {"MUSTER_ETCD_KEY": str(tmp_path / "none"), "MUSTER_STORE_DRIVER": "zookeeper"}
    with pytest.raises(ConfigError) as caught:
        load(Config, {}, environ)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "--store-driver",
        "--min",
        "--max",
    ]
    environ["MUSTER_STORE_DRIVER"] = "etcd"
    with pytest.raises(ConfigError, match=r"--etcd-key \(MUSTER_ETCD_KEY\) cannot be read"):
        load(JobConfig, {}, environ)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MUSTER_ETCD_ENDPOINTS", f"https://u:{SECRET}@etcd:2379"),
        ("MUSTER_ETCD_ENDPOINTS", f"u:{SECRET}@etcd"),
        ("MUSTER_ETCD_USER", f"u:{SECRET}"),
        ("MUSTER_ETCD_USER", f"\n{SECRET}"),
        ("MUSTER_ETCD_PASSWORD_FILE", SECRET),
        ("MUSTER_ETCD_PASSWORD_FILE", f"{SECRET}\n"),
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(JobConfig, {}, {"MUSTER_JOB": "digits", "MUSTER_ETCD_USER": "u", name: text})
    assert SECRET not in str(caught.value)
    assert "--etcd-" in str(caught.value)


def test_a_run_with_its_own_store_keeps_what_the_users_one_asks_for_to_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MUSTER_ETCD_USER", "somebody")
    line = LaunchLine(("torchrun",), 1)
    settings = LocalSettings(
        run="r",
        namespace="local",
        job="local",
        line=line,
        nodes=1,
        policy=JobPolicy(1, 1, gather_s=2.0),
        restarts=0,
        lease_ttl_s=10.0,
        checkpoints=tmp_path,
        access=None,
        native=False,
    )
    pod = Pod("node-0", "uid", "worker", tmp_path, 1, 2)
    assert "MUSTER_ETCD_USER" not in sidecar_environment(settings, pod, "127.0.0.1:1")
    theirs = replace(settings, access=Access(PLAIN))
    assert sidecar_environment(theirs, pod, PLAIN[0])["MUSTER_ETCD_USER"] == "somebody"


async def test_a_password_over_plain_text_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    await open_store(Access(PLAIN, user="u", password_file=f"/{SECRET}")).close()
    (record,) = caplog.records
    assert "in plain text" in record.getMessage()
    assert SECRET not in record.getMessage()


def test_no_two_jobs_share_a_role() -> None:
    jobs = [("a", "b"), ("a", "b-2"), ("a-b", "c"), ("a.b", "c"), ("a", "b.c"), ("a", "b%2Fc")]
    names = {JobRole(JobKeys(namespace, job)).name for namespace, job in jobs}
    assert len(names) == len(jobs)
    assert JobRole(JobKeys("team", "digits")).name == "muster/v1/team/digits"
    assert JobRole(JobKeys("team", "digits"), "cn").user_name == "cn"


async def test_files_that_change_one_after_the_other_are_taken_once_they_fit(
    files: Access, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation that is half done leaves the former certificate in force, and says so once."""
    monkeypatch.setattr(credentials, "LOOK_S", 0.0)
    seen = CertificateFiles(files)
    await seen.look(urgent=False, timeout_s=DEADLINE_S)
    first = seen.certificates
    assert (seen.version, first) == (1, await asyncio.to_thread(read_certificates, files))
    fresh = await asyncio.to_thread(fresh_certificate, files)
    await asyncio.to_thread(write, Path(files.cert), fresh[0])
    for _ in range(3):
        await seen.look(urgent=False, timeout_s=DEADLINE_S)
    assert (seen.version, seen.certificates) == (1, first)
    (record,) = caplog.records
    assert "do not belong together" in record.getMessage()
    assert "the previous certificates stay in use" in record.getMessage()
    await asyncio.to_thread(write, Path(files.key), fresh[1])
    await seen.look(urgent=False, timeout_s=DEADLINE_S)
    assert seen.version == 2
    assert seen.certificates is not None
    assert (seen.certificates.cert, seen.certificates.key) == fresh
    await asyncio.to_thread(Path(files.key).touch)
    await seen.look(urgent=False, timeout_s=DEADLINE_S)
    assert seen.version == 2


def fresh_certificate(access: Access) -> tuple[bytes, bytes]:
    folder = Path(access.cert).parent / "fresh"
    folder.mkdir()
    cert, key = Authority(folder).client("somebody")
    return cert.read_bytes(), key.read_bytes()


def rotate(access: Access) -> None:
    for path, content in zip((access.cert, access.key), fresh_certificate(access), strict=True):
        write(Path(path), content)


async def test_files_are_looked_at_more_often_while_there_is_no_connection(
    files: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "URGENT_LOOK_S", 0.0)
    monkeypatch.setattr(credentials, "LOOK_S", 3600.0)
    seen = CertificateFiles(files)
    await seen.look(urgent=False, timeout_s=DEADLINE_S)
    await asyncio.to_thread(rotate, files)
    await seen.look(urgent=False, timeout_s=DEADLINE_S)
    assert seen.version == 1
    await seen.look(urgent=True, timeout_s=DEADLINE_S)
    assert seen.version == 2


async def test_files_that_never_were_good_are_an_error(files: Access) -> None:
    await asyncio.to_thread(without, files.cacert)
    seen = CertificateFiles(files)
    with pytest.raises(ConfigError, match="--etcd-cacert"):
        await seen.look(urgent=True, timeout_s=DEADLINE_S)
    assert seen.version == 0


async def test_files_on_a_disk_that_hangs_hold_no_call_up(
    files: Access, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without former files the time-out is told; with them they stay, and nobody waits twice."""
    reads = 0
    begun, mended = threading.Event(), threading.Event()

    def hanging(access: Access) -> Certificates:
        nonlocal reads
        reads += 1
        begun.set()
        mended.wait(DEADLINE_S)
        return read_certificates(access)

    monkeypatch.setattr(credentials, "read_certificates", hanging)
    monkeypatch.setattr(credentials, "LOOK_S", 0.0)
    seen = CertificateFiles(files)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await seen.look(urgent=True, timeout_s=0.05)
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    assert (seen.version, reads) == (0, 1)
    mended.set()
    await seen.look(urgent=True, timeout_s=DEADLINE_S)
    assert (seen.version, reads) == (1, 1)
    mended.clear()
    begun.clear()
    await asyncio.to_thread(Path(files.cert).touch)
    await seen.look(urgent=False, timeout_s=0.1)
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    for _ in range(20):
        with pytest.raises(StopIteration):
            # It ends at its first step: there was nothing that it has waited for.
            seen.look(urgent=False, timeout_s=1).send(None)
    assert (seen.version, reads) == (1, 2)
    assert "the previous certificates stay in use" in caplog.text
    mended.set()


async def test_a_call_whose_files_cannot_be_read_was_not_sent(
    files: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    mended = threading.Event()
    monkeypatch.setattr(credentials, "read_certificates", lambda _: mended.wait(DEADLINE_S))
    store = EtcdStore(files)
    try:
        with pytest.raises(StoreUnavailable, match="certificate files cannot be read within"):
            await store.txn([], [Put("k", b"")], timeout_s=0.2)
    finally:
        mended.set()
        await store.close()
