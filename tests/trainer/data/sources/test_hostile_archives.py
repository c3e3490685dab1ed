"""Archives come from anywhere: a hostile one is refused by name, and writes and fills nothing."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_store.errors import DataRejected, WrongUsage
from tests.trainer.data.sources.forms import files_of, listed, read, tarred, zipped
from tests.trainer.folders import write_classes
from trainer.data.sources import limits
from trainer.data.sources.place import inner_parts


@pytest.fixture(autouse=True)
def _nothing_is_written(tmp_path: Path) -> Iterator[None]:
    """Every test leaves the files that it made itself, and no others."""
    before = set(tmp_path.parent.iterdir())
    yield
    assert set(tmp_path.parent.iterdir()) == before
    assert not (tmp_path.parent / "evil.png").exists()


def png(tmp_path: Path) -> bytes:
    folder = tmp_path / "one"
    if not folder.exists():
        write_classes(folder, ["a"], images=1)
    return files_of(folder)[0].read_bytes()


def zip_with(tmp_path: Path, *entries: str | zipfile.ZipInfo) -> Path:
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("cat/0.png", "cat/1.png", *entries):
            archive.writestr(name, png(tmp_path))
    return path


def tar_with(tmp_path: Path, *entries: tarfile.TarInfo) -> Path:
    path = tmp_path / "photos.tar"
    with tarfile.open(path, "w") as archive:
        for entry in (tarfile.TarInfo("cat/0.png"), *entries):
            data = png(tmp_path) if entry.isreg() else b""
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../../evil.png", r"leads out of the data with `\.\.`"),
        ("cat/../../evil.png", "leads out"),
        ("..\\evil.png", "leads out"),
        ("/etc/evil.png", "is an absolute path"),
        ("C:\\evil.png", "is an absolute path"),
        ("\\\\server\\evil.png", "is an absolute path"),
        ("/".join("d" * 40) + "/x.png", "more than 32 folders deep"),
        ("cat/0.png/x.png", "is in a file of the same name"),
        ("cat/./1.png", "comes twice"),
        ("cat", "comes twice"),
    ],
)
def test_a_name_that_leads_elsewhere_refuses_the_archive(
    tmp_path: Path, name: str, reason: str
) -> None:
    with pytest.raises(DataRejected, match=f"nothing of it is read, for 1 member: .*{reason}"):
        listed(zip_with(tmp_path, name))
    with pytest.raises(DataRejected, match=reason):
        listed(tar_with(tmp_path, tarfile.TarInfo("cat/1.png"), tarfile.TarInfo(name)))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_in_a_zip_are_refused(tmp_path: Path, kind: int) -> None:
    entry = zipfile.ZipInfo("cat/link.png")
    entry.external_attr = (kind | 0o777) << 16
    with pytest.raises(DataRejected, match=r"cat/link\.png is a link or a device"):
        listed(zip_with(tmp_path, entry))


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    entry = tarfile.TarInfo("cat/link.png")
    entry.type, entry.linkname = kind, "/etc/passwd"
    with pytest.raises(DataRejected, match=r"cat/link\.png is a link or a device"):
        listed(tar_with(tmp_path, entry))


def patched(path: Path, offset_in_header: int, value: int, form: str) -> None:
    """Change a field of the second file in the zip's directory, and leave the rest."""
    data = bytearray(path.read_bytes())
    first = data.index(b"PK\x01\x02")
    struct.pack_into(form, data, data.index(b"PK\x01\x02", first + 1) + offset_in_header, value)
    path.write_bytes(data)


def test_an_encrypted_zip_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = zip_with(tmp_path)
    patched(path, 8, 0x1, "<H")
    with pytest.raises(DataRejected, match=r"cat/1\.png is encrypted; unpack it with its password"):
        listed(path)


def test_other_packers_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = zip_with(tmp_path)
    patched(path, 10, zipfile.ZIP_LZMA, "<H")
    with pytest.raises(DataRejected, match="method 14; pack it again with deflate"):
        listed(path)
    folder = write_classes(tmp_path / "folder", ["a"], images=1)
    with tarfile.open(tmp_path / "photos.tar.xz", "w:xz") as archive:
        archive.add(folder)
    with pytest.raises(DataRejected, match="is packed with xz: unpack it, or pack it with gzip"):
        listed(tmp_path / "photos.tar.xz")


def test_names_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    path = zip_with(tmp_path, "cat/caf~.png")
    path.write_bytes(path.read_bytes().replace(b"caf~", b"caf\xe9"))
    with pytest.raises(DataRejected, match="is not UTF-8"):
        listed(path)
    made = tar_with(tmp_path, tarfile.TarInfo("cat/caf\udce9.png"))
    with pytest.raises(DataRejected, match="is not UTF-8") as refused:
        listed(made)
    assert str(refused.value).isprintable()


def test_names_in_utf_8_without_the_mark_are_read(tmp_path: Path) -> None:
    path = zip_with(tmp_path, "caf~~/0.png")
    path.write_bytes(path.read_bytes().replace(b"caf~~", "café".encode()))
    assert listed(path).names == ("café", "cat")


def test_names_that_differ_in_case_only_stay_two(tmp_path: Path) -> None:
    """Nothing is unpacked to a disk, where one would replace the other."""
    listing = listed(zip_with(tmp_path, "CAT/0.png", "cat/0.PNG"))
    assert listing.images_by_class == {"CAT": 1, "cat": 3}


def test_all_hostile_members_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    names = [f"../{number}.png" for number in range(30)]
    with pytest.raises(DataRejected, match=r"for 30 members: \.\./0\.png .* and 10 more"):
        listed(zip_with(tmp_path, *names))


def test_a_zip_that_unpacks_to_far_more_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FREE_BYTES", 1 << 20)
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("cat/0.bmp", bytes(4 << 20))
    with pytest.raises(DataRejected, match="more than 200 times its size"):
        listed(path)


def test_a_packed_tar_that_unpacks_to_far_more_is_stopped_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FREE_BYTES", 1 << 20)
    kept: list[int] = []
    append = limits.StoredBytes.append
    monkeypatch.setattr(
        limits.StoredBytes,
        "append",
        lambda self, data: kept.append(len(data)) or append(self, data),  # type: ignore[func-returns-value]
    )
    path = tmp_path / "photos.tar.gz"
    path.write_bytes(gzip.compress(bytes(16 << 20), 9))
    with pytest.raises(DataRejected, match="more than 200 times its size"):
        listed(path)
    assert sum(kept) < 200 * path.stat().st_size + (2 << 20) < 16 << 20


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MEMBERS", 2)
    with pytest.raises(DataRejected, match="more than 2 files"):
        listed(zip_with(tmp_path, "cat/2.png"))


def test_too_many_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(DataRejected, match=r"more than 100 B: unpack it, and give the folder"):
        listed(zip_with(tmp_path))


def test_a_huge_member_is_a_bad_image_and_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_FILE_BYTES", 16 << 20)
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("cat/0.png", "w") as file:
            for _ in range(40):
                file.write(bytes(1 << 20))
        archive.writestr("cat/1.png", png(tmp_path))
    listing = listed(path)
    tracemalloc.start()
    with pytest.raises(DataRejected, match=r"cat/0\.png \(40\.0 MiB; at most 16\.0 MiB"):
        read(listing)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_a_length_that_lies_is_a_damaged_image(tmp_path: Path) -> None:
    path = zip_with(tmp_path)
    patched(path, 24, 10, "<I")
    with pytest.raises(DataRejected, match=r"1 image cannot be read: photos\.zip: cat/1\.png"):
        read(listed(path))


def test_a_damaged_member_is_named(tmp_path: Path) -> None:
    path = zip_with(tmp_path)
    data = path.read_bytes()
    start = data.index(png(tmp_path))
    path.write_bytes(data[:start] + bytes(40) + data[start + 40 :])
    with pytest.raises(DataRejected, match=r"cat/0\.png \(damaged in the archive"):
        read(listed(path))


@pytest.mark.parametrize("name", ["photos.zip", "photos.tar", "photos.tar.gz"])
def test_an_archive_that_is_cut_short_is_refused_everywhere(tmp_path: Path, name: str) -> None:
    folder = write_classes(tmp_path / "folder", ["a", "b"], images=2)
    made = zipped if name.endswith("zip") else tarred
    whole = made(folder, tmp_path / name).read_bytes()
    ends = [*range(0, 60, 7), *range(60, len(whole) - 1, len(whole) // 25)]
    refusals = 0
    for end in ends:
        (tmp_path / name).write_bytes(whole[:end])
        try:
            read(listed(tmp_path / name))
        except (DataRejected, WrongUsage):
            refusals += 1
    # A tar may be cut between two files, and between the last file and the zeros at its end.
    assert refusals >= (len(ends) - 12 if name == "photos.tar" else len(ends))


def test_forged_lengths_ask_for_no_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("cat/0.png")
    header.size, header.type = 1 << 32, tarfile.XHDTYPE
    path = tmp_path / "photos.tar"
    path.write_bytes(header.tobuf() + bytes(2048))
    with pytest.raises(DataRejected, match="headers of more than 1024 KiB"):
        listed(path)


def test_a_header_that_leads_backwards_ends_the_reading(tmp_path: Path) -> None:
    header = tarfile.TarInfo("cat/0.png")
    data = bytearray(header.tobuf(format=tarfile.GNU_FORMAT))
    data[124:136] = b"\xff" * 11 + b"\x00"  # the size as a negative number
    data[148:156] = b"        "
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path = tmp_path / "photos.tar"
    path.write_bytes(bytes(data) + bytes(10240))
    with pytest.raises((DataRejected, WrongUsage)):
        listed(path)


def test_no_room_to_unpack_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tarred(write_classes(tmp_path / "folder", ["a"], images=1), tmp_path / "p.tar.gz")
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
        with pytest.raises(DataRejected, match="no room to unpack the data: set TMPDIR"):
            listed(path)


@pytest.mark.parametrize("name", ["https://example.org/cat.png", "file:///etc/passwd", "a\0.png"])
def test_no_name_is_an_address(name: str) -> None:
    with pytest.raises(ValueError, match=r"is an address|is not the name of a file"):
        inner_parts(name)
