"""Small files that unpack to far more than they are, of every form of data."""

from __future__ import annotations

import gzip
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

Bomb = Callable[[Path, int], Path]
"""Write a bomb into a folder. It takes about so many bytes where nothing stops it."""
MEMBER_BYTES = 1 << 10
SIZE_FIELD, KIND_FIELD = slice(124, 136), 156
SUM_FIELD = slice(148, 156)


def tar_gz(folder: Path, *blocks: bytes) -> Path:
    path = folder / "bomb.tar.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for one in blocks:
            file.write(one)
        file.write(bytes(1024))
    return path


def members(count: int, *, kind: bytes, name: str = "d%08d") -> bytes:
    """Make headers that differ in their number alone, many at a time."""
    entry = tarfile.TarInfo(name % 0)
    entry.type, entry.linkname = kind, "x" if kind == tarfile.SYMTYPE else ""
    first = np.frombuffer(entry.tobuf(tarfile.USTAR_FORMAT), np.uint8)
    at = (name % 0).rindex("0" * 8)
    digits = np.arange(count)[:, None] // 10 ** np.arange(7, -1, -1) % 10
    made = np.repeat(first[None], count, axis=0)
    made[:, at : at + 8] = digits + ord("0")
    plain = first.astype(int).sum() - first[SUM_FIELD].astype(int).sum() + 8 * 32
    total = plain + digits.sum(axis=1)
    octal = total[:, None] // 8 ** np.arange(5, -1, -1) % 8 + ord("0")
    made[:, 148:154] = octal
    return made.tobytes()


def header(kind: bytes, size: int, *, name: str = "x") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.USTAR_FORMAT)


def block(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def tar_of_folders(folder: Path, total: int) -> Path:
    return tar_gz(folder, members(total // MEMBER_BYTES, kind=tarfile.DIRTYPE))


def tar_of_deep_folders(folder: Path, total: int) -> Path:
    deep = "d%08d/" + "/".join("abcdefghijklmnopqrstuvwxyz")
    return tar_gz(folder, members(total // MEMBER_BYTES // 26, kind=tarfile.DIRTYPE, name=deep))


def tar_of_links(folder: Path, total: int) -> Path:
    return tar_gz(folder, members(total // MEMBER_BYTES, kind=tarfile.SYMTYPE))


def tar_of_empty_files(folder: Path, total: int) -> Path:
    return tar_gz(folder, members(total // MEMBER_BYTES, kind=tarfile.REGTYPE))


def tar_of_zeros(folder: Path, total: int) -> Path:
    zeros = bytes(1 << 20)
    return tar_gz(folder, header(tarfile.REGTYPE, total), *[zeros] * (total >> 20))


def tar_of_a_long_name(folder: Path, total: int) -> Path:
    data = b"a" * (total // 16)
    return tar_gz(folder, header(tarfile.GNUTYPE_LONGNAME, len(data)), block(data))


def tar_of_pax_headers(folder: Path, total: int) -> Path:
    one = b"".join(b"16 %08x=abcd\n" % number for number in range(4096))
    piece = header(tarfile.XGLTYPE, len(one)) + block(one)
    return tar_gz(folder, *[piece] * (total // 16 // len(piece)))


def tar_of_chained_headers(folder: Path, total: int) -> Path:
    one = b"7 a=bc\n"
    piece = header(tarfile.XHDTYPE, len(one)) + block(one)
    return tar_gz(folder, piece * 1500)


def tar_of_a_sparse_file(folder: Path, total: int) -> Path:
    head = bytearray(header(tarfile.GNUTYPE_SPARSE, 0))
    head[257:265] = b"ustar  \0"
    head[482] = 1
    head[SUM_FIELD] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    more = b"%011o\0%011o\0" % (1, 1) * 21
    return tar_gz(folder, bytes(head), block(more + b"\1") * (total // 64 // 512))


def zip_of_zeros(folder: Path, total: int) -> Path:
    path = folder / "bomb.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
        archive.open("cat/0.bmp", "w", force_zip64=True) as file,
    ):
        for _ in range(total >> 20):
            file.write(bytes(1 << 20))
    return path


def zip_of_entries(folder: Path, total: int) -> Path:
    count = total // MEMBER_BYTES
    one = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", *[20, 3, 20, 0], *[0] * 14) + b"a"
    one = one[:28] + struct.pack("<H", 1) + one[30:]
    directory = one * count
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), 0, 0)
    (folder / "bomb.zip").write_bytes(directory + end)
    return folder / "bomb.zip"


def parquet_of_one_value(folder: Path, total: int) -> Path:
    """All rows share one image, which is in the file once."""
    import pyarrow
    from pyarrow import parquet

    each = 1 << 17
    rows = total // each
    image = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), [bytes(each)])
    label = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["cat"])
    parquet.write_table(
        pyarrow.table({"image": image, "label": label}),
        folder / "bomb.parquet",
        compression="zstd",
        dictionary_pagesize_limit=1 << 30,
    )
    return folder / "bomb.parquet"


def parquet_of_large_values(folder: Path, total: int) -> Path:
    """A few rows share one image of many bytes: a batch of them is large."""
    import pyarrow
    from pyarrow import parquet

    image = pyarrow.DictionaryArray.from_arrays(np.zeros(64, np.int32), [bytes(total // 32)])
    label = pyarrow.DictionaryArray.from_arrays(np.zeros(64, np.int32), ["cat"])
    parquet.write_table(
        pyarrow.table({"image": image, "label": label}),
        folder / "bomb.parquet",
        compression="zstd",
        dictionary_pagesize_limit=1 << 30,
    )
    return folder / "bomb.parquet"


def parquet_of_a_page(folder: Path, total: int) -> Path:
    import pyarrow
    from pyarrow import parquet

    image = pyarrow.array([bytes(total // 4)] * 2, pyarrow.binary())
    parquet.write_table(
        pyarrow.table({"image": image, "label": ["cat", "dog"]}),
        folder / "bomb.parquet",
        compression="zstd",
        use_dictionary=False,
    )
    return folder / "bomb.parquet"


def parquet_of_rows(folder: Path, total: int) -> Path:
    import pyarrow
    from pyarrow import parquet

    rows = total // MEMBER_BYTES
    image = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), [b"x"])
    label = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["cat"])
    parquet.write_table(pyarrow.table({"image": image, "label": label}), folder / "bomb.parquet")
    return folder / "bomb.parquet"


def written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def csv_of_fields(folder: Path, total: int) -> Path:
    return written(folder, "bomb.csv", b"file,label\n" + b"," * (total // 16))


def csv_of_one_row(folder: Path, total: int) -> Path:
    return written(folder, "bomb.csv", b"file,label\n" + b'"\n",' * (total // 64))


def csv_of_rows(folder: Path, total: int) -> Path:
    return written(folder, "bomb.csv", b"file,label\n" + b"a,b\n" * (total // 256))


def jsonl_of_lists(folder: Path, total: int) -> Path:
    return written(folder, "bomb.jsonl", b'{"file":[' + b"[]," * (total // 64) + b"0]}\n")


def jsonl_of_lines(folder: Path, total: int) -> Path:
    return written(folder, "bomb.jsonl", b"1\n" * (total // 256))


def coco_of_objects(folder: Path, total: int) -> Path:
    some = b'{"id":1},' * (total // 232)
    return written(
        folder, "bomb.json", b'{"images":[' + some + b'0],"annotations":[],"categories":[]}'
    )


def fiftyone_of_depth(folder: Path, total: int) -> Path:
    deep = b"[" * 600 + b"0" + b"]" * 600
    return written(folder, "bomb.json", b'{"classes":["a"],"labels":{"x":' + deep + b"}}")


def yaml_of_merges(folder: Path, total: int) -> Path:
    lines = ["a0: &a0 {k: v}"]
    for number in range(1, 24):
        merged = ", ".join([f"*a{number - 1}"] * 9)
        lines.append(f"a{number}: &a{number} {{<<: [{merged}]}}")
    return written(folder, "bomb.yaml", "\n".join(lines).encode())


BOMBS: dict[str, Bomb] = {
    "zip of zeros": zip_of_zeros,
    "zip of entries": zip_of_entries,
    "tar of zeros": tar_of_zeros,
    "tar of folders": tar_of_folders,
    "tar of deep folders": tar_of_deep_folders,
    "tar of links": tar_of_links,
    "tar of empty files": tar_of_empty_files,
    "tar of a long name": tar_of_a_long_name,
    "tar of pax headers": tar_of_pax_headers,
    "tar of chained headers": tar_of_chained_headers,
    "tar of a sparse file": tar_of_a_sparse_file,
    "parquet of one value": parquet_of_one_value,
    "parquet of large values": parquet_of_large_values,
    "parquet of a page": parquet_of_a_page,
    "parquet of rows": parquet_of_rows,
    "CSV of fields": csv_of_fields,
    "CSV of one row": csv_of_one_row,
    "CSV of rows": csv_of_rows,
    "JSONL of lists": jsonl_of_lists,
    "JSONL of lines": jsonl_of_lines,
    "COCO of objects": coco_of_objects,
    "FiftyOne of depth": fiftyone_of_depth,
    "YAML of merges": yaml_of_merges,
}
