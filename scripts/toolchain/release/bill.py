# SPDX-License-Identifier: Apache-2.0
"""A bill of materials (SBOM) for each artefact: CycloneDX 1.6 in JSON, validated by its schema."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email.parser import Parser
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from release.archives import sha256

STATUS = "./var/lib/dpkg/status"
DISTRIBUTION = {"distro": "debian-12"}
_REQUIREMENT = re.compile(r"([\w.-]+)")


def write_bill(
    path: Path, subject: Component, parts: Iterable[Component], time_s: int, digest: str
) -> None:
    """Write the bill of ``subject``; the serial number is derived from ``digest``, the artefact's.

    Raises ``ValueError`` if the schema rejects it.
    """
    bill = Bom(
        components=sorted(parts, key=lambda one: (one.name, one.version or "")),
        serial_number=uuid5(NAMESPACE_URL, digest),
    )
    bill.metadata.component = subject
    bill.metadata.timestamp = datetime.fromtimestamp(time_s, UTC)
    bill.register_dependency(subject, bill.components)
    text = JsonV1Dot6(bill).output_as_string(indent=1)
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault is not None:
        raise ValueError(f"{path.name} is no CycloneDX: {fault}")
    path.write_text(text + "\n")


def subject(name: str, version: str, kind: ComponentType, digest: str) -> Component:
    """Build the component of the artefact itself."""
    return Component(name=name, version=version, type=kind, bom_ref=name, hashes=[_hash(digest)])


def python_packages(wheels: Iterable[Path]) -> Iterator[Component]:
    """Yield the Python packages of these wheels, with the wheels' digests."""
    for wheel in sorted(wheels):
        name, version, _ = wheel.name.split("-", 2)
        yield _python(name.replace("_", "-").lower(), version, sha256(wheel))


def requirements_of(wheel: Path) -> Iterator[Component]:
    """Yield the requirements of a wheel by name only, as the installing user picks the versions."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    for requirement in metadata.get_all("Requires-Dist") or []:
        if "extra ==" not in requirement:
            found = _REQUIREMENT.match(requirement)
            assert found is not None, requirement
            yield _python(found[1], None, None)


def debian_packages(base: Path) -> Iterator[Component]:
    """Yield the Debian packages that the base of an image contains."""
    with tarfile.open(base) as archive:
        found = archive.extractfile(STATUS)
        assert found is not None
        text = found.read().decode()
    for paragraph in filter(None, text.split("\n\n")):
        told = Parser().parsestr(paragraph, headersonly=True)
        name, version = told["Package"], told["Version"]
        which = {"arch": told["Architecture"], **DISTRIBUTION}
        url = PackageURL("deb", "debian", name, version, which)
        yield Component(
            name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url)
        )


def images_of(values: str) -> Iterator[Component]:
    """Yield the images that the chart's values name."""
    named = re.findall(r"image: \S*?([\w-]+):(\S+)$", values, re.MULTILINE)
    etcd = re.search(r"repository: (\S+)\n.*\n    tag: (\S+)", values)
    assert etcd is not None
    for name, version in [*named, (etcd[1], etcd[2])]:
        url = PackageURL("oci", None, name, None, {"tag": version})
        kind = ComponentType.CONTAINER
        yield Component(name=name, version=version, type=kind, purl=url, bom_ref=str(url))


def _python(name: str, version: str | None, digest: str | None) -> Component:
    url = PackageURL("pypi", None, name, version)
    hashes = [_hash(digest)] if digest else []
    kind = ComponentType.LIBRARY
    return Component(
        name=name, version=version, type=kind, purl=url, bom_ref=str(url), hashes=hashes
    )


def _hash(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest.removeprefix("sha256:"))
