"""One accident in a folder of checkpoints: each kind damages or replaces the newest checkpoint and returns a
description.
"""

import shutil

PAGE = 4096


def bit(chance, save, other):
    """Flips one bit of one file."""
    path, data = _some_file(chance, save)
    at = chance.randrange(8 * len(data))
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)
    return f"bit {at} of {path.name}"


def page(chance, save, other):
    """Fills a page of a file with zeros."""
    path, data = _some_file(chance, save)
    pages = [start for start in range(0, len(data), PAGE) if any(data[start : start + PAGE])]
    start = chance.choice(pages)
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    path.write_bytes(data)
    return f"page at {start} of {path.name}"


def truncation(chance, save, other):
    """Cuts off the end of a file."""
    path, data = _some_file(chance, save)
    length = chance.randrange(len(data))
    path.write_bytes(data[:length])
    return f"{path.name} cut to {length}"


def emptiness(chance, save, other):
    """Empties a file."""
    path, _ = _some_file(chance, save)
    path.write_bytes(b"")
    return f"{path.name} empty"


def extension(chance, save, other):
    """Appends bytes to a file."""
    path, data = _some_file(chance, save)
    path.write_bytes(data + chance.randbytes(chance.randint(1, PAGE)))
    return f"{path.name} longer"


def swap(chance, save, other):
    """Replaces a file with one of another checkpoint."""
    path = chance.choice(
        [each for each in sorted(save.iterdir()) if each.read_bytes() != (other / each.name).read_bytes()]
    )
    path.write_bytes((other / path.name).read_bytes())
    return f"{path.name} of {other.name}"


def stale_manifest(chance, save, other):
    """Uses the manifest of another checkpoint, with and without a corrected step."""
    text = (other / "manifest.json").read_text()
    if chance.random() < 0.5:
        text = text.replace(f'"step": {int(other.name[5:])}', f'"step": {int(save.name[5:])}')
    (save / "manifest.json").write_text(text)
    return f"manifest of {other.name}"


def missing_file(chance, save, other):
    path, _ = _some_file(chance, save)
    path.unlink()
    return f"{path.name} missing"


def duplicate(chance, save, other):
    """Puts an older checkpoint under the name of a newer one in the place of the newest."""
    shutil.rmtree(save)
    shutil.copytree(other, save)
    return f"copy of {other.name}"


def renamed_folder(chance, save, other):
    """Renames the newest checkpoint to a later name."""
    later = save.with_name(f"step-{int(save.name[5:]) + chance.randint(1, 10**6):08d}")
    save.rename(later)
    return f"is now {later.name}"


KINDS = (
    bit,
    page,
    truncation,
    emptiness,
    extension,
    swap,
    stale_manifest,
    missing_file,
    duplicate,
    renamed_folder,
)
OF_ONE_FILE = (bit, page, truncation, emptiness, extension)  # those that can also happen to a single file


def _some_file(chance, save):
    """Larger files are chosen more often: tensor bytes are most of a checkpoint."""
    files = sorted(save.iterdir())
    path = chance.choices(files, [each.stat().st_size + 500 for each in files])[0]
    return path, bytearray(path.read_bytes())
