"""Any state of the supported types survives the disk with the same bits and types, readable by other tools;
unsupported parts are named.
"""

import hashlib
import json
import math
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.checkpoint import disk
from flatout.checkpoint.checkpoints import CheckpointFolder, verified, write_state
from flatout.checkpoint.disk import FileDigest
from flatout.checkpoint.manifest import Manifest
from flatout.checkpoint.metadata import environment
from flatout.checkpoint.random_states import random_states
from flatout.checkpoint.tensors import read_tensors, write_tensors
from flatout.checkpoint.values import pack, unpack
from flatout.schema.errors import CheckpointError

torch = pytest.importorskip("torch", reason="not run: there is no torch here")
numpy = pytest.importorskip("numpy", reason="not run: there is no numpy here")

DTYPES = [
    getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "complex64",
        "complex128",
        "bool",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "complex32",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
]


def of_bytes(dtype, shape, seed):
    """Any bits at all, including NaNs with payloads."""
    size = math.prod(shape) * dtype.itemsize
    data = random.Random(seed).randbytes(size)
    if dtype is torch.bool:
        data = bytes(each & 1 for each in data)
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if size
        else torch.empty(shape, dtype=dtype)
    )


def laid_out(tensor, how):
    if how == "sliced" and tensor.dim():
        return torch.cat([tensor, tensor]).contiguous()[::2] if tensor.dtype not in FEW else tensor[:1]
    if how == "channels_last" and tensor.dim() == 4 and tensor.dtype not in FEW:
        return tensor.contiguous(memory_format=torch.channels_last)
    if how == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    return tensor


FEW = {
    getattr(torch, name)
    for name in (
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "complex32",
        "uint16",
        "uint32",
        "uint64",
    )
    if hasattr(torch, name)
}
tensors = st.builds(
    lambda dtype, shape, seed, how: laid_out(of_bytes(dtype, shape, seed), how),
    st.sampled_from(DTYPES),
    st.one_of(st.lists(st.integers(0, 3), max_size=4), st.just([2, 3, 4, 4])),
    st.integers(0, 999),
    st.sampled_from(["plain", "sliced", "channels_last", "transposed"]),
)
arrays = st.builds(
    lambda kind, shape, seed: (
        numpy.frombuffer(
            random.Random(seed).randbytes(math.prod(shape) * numpy.dtype(kind).itemsize + 1),
            kind,
            math.prod(shape),
        )
        .reshape(shape)
        .copy()
    ),
    st.sampled_from(["<f8", "<f4", "<i8", ">i4", "<u2", "|b1", "<c16", "<M8[ns]", "|S3"]),
    st.sampled_from([(), (0,), (3,), (2, 2), (700, 3)]),
    st.integers(0, 99),
)
words = st.text(st.characters(), max_size=8)  # lone surrogates too: names of files that are not UTF-8
numbers = st.one_of(st.integers(), st.sampled_from([2**63, -(2**63) - 1, 0, -1]))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.floats(),
    words,
    st.binary(max_size=9),
    st.complex_numbers(allow_nan=False),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([1, 2, -3])),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3])]),
    st.builds(numpy.float64, st.floats()),
    st.builds(numpy.int16, st.integers(-9, 9)),
    st.builds(numpy.str_, st.sampled_from(["", "ab"])),
)
keys = st.one_of(
    words,
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.tuples(words, st.integers()),
    st.binary(max_size=4),
)
states = st.recursive(
    st.one_of(leaves, tensors, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(words, st.integers(), max_size=3).map(Counter),
        st.dictionaries(words, inner, max_size=2).map(lambda found: defaultdict(list, found)),
        st.lists(inner, max_size=3).map(lambda found: deque(found, 5)),
        st.sets(st.one_of(st.integers(), words), max_size=4),
        st.frozensets(st.integers(), max_size=4),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=64, max_size=70),
        st.lists(st.integers(0, 2**32), min_size=64, max_size=66).map(tuple),
    ),
    max_leaves=12,
)


def same(a, b):
    """Bitwise equal, with equal types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, (numpy.ndarray, numpy.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        left = not isinstance(a, defaultdict) or a.default_factory is b.default_factory
        return (
            left
            and len(a) == len(b)
            and all(same(one, other) for one, other in zip(a.items(), b.items(), strict=True))
        )
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(same(one, other) for one, other in zip(a, b, strict=True))
    return a == b


def bits(tensor):
    return (
        bytes(tensor.detach().contiguous().flatten().unsqueeze(-1).view(torch.uint8).numpy().tobytes())
        if tensor.numel()
        else b""
    )


@given(states)
@settings(max_examples=150)
def test_any_state_is_restored_bit_for_bit(tmp_path_factory, state):
    from safetensors import safe_open

    folder = tmp_path_factory.mktemp("state")
    packed = pack(torch, state)
    assert packed.left_out == {}
    files = write_state(folder, "", packed)
    tree = json.loads((folder / "state.json").read_bytes())
    tensors = (
        read_tensors(torch, folder / "tensors.safetensors", files["tensors.safetensors"])
        if packed.tensors
        else {}
    )
    assert same(state, unpack(torch, tree, tensors))
    if packed.tensors:  # and any program with the library can open it
        with safe_open(folder / "tensors.safetensors", "pt") as file:
            assert set(file.keys()) == set(packed.tensors)
            for name in file.keys():  # noqa: SIM118
                assert bits(file.get_tensor(name)) == bits(packed.tensors[name])


def test_tied_tensors_stay_tied_and_unsupported_types_are_named(tmp_path):
    class Strange:
        pass

    class MyList(list):
        pass

    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    image = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    round_and_round = [1]
    round_and_round.append(round_and_round)
    round_and_round.append(round_and_round)  # twice: following both references would never end
    deep = []
    for _ in range(80):
        deep = [deep]
    state = {
        "model": {"a": weight, "b": weight, "image": image},
        "odd": [1, Strange(), lambda: 0],
        "set": {1, Strange},
        "mine": MyList([1]),
        "sparse": torch.eye(3).to_sparse(),
        "round": round_and_round,
        "\ud800": torch.zeros(2),
        "deep": deep,
        ("key", 1): Strange(),
        "structured": numpy.zeros(2, dtype="i4,f8"),
        "objects": numpy.array([object()]),
        "half": torch.rand(4)[::2],
        "grows": torch.ones(1).expand(5),
    }
    packed = pack(torch, state)
    assert set(packed.left_out) == {
        "odd[1]",
        "odd[2]",
        "set[1]",
        "set[0]",
        "mine",
        "sparse",
        "round[1]",
        "round[2]",
        "[('key', 1)]",
        "structured",
        "objects",
        next(name for name in packed.left_out if name.startswith("deep")),
    } - {"set[0]" if "set[1]" in packed.left_out else "set[1]"}
    assert packed.left_out["odd[1]"].endswith("Strange")
    assert len(packed.tensors) == 5  # the tied one once
    assert all(
        name.encode() for name in packed.tensors
    )  # other readers would reject a lone surrogate as a name
    with CheckpointFolder(tmp_path / "saves") as saves:
        save = saves.write("test", 7, {"": packed})
    assert save.manifest.left_out == packed.left_out
    back = verified(save.path).read(torch)
    assert back["model"]["a"].data_ptr() == back["model"]["b"].data_ptr()
    assert back["model"]["image"].stride() == image.stride()
    assert back["odd"] == [1, None, None]
    assert back["set"] == {1}
    assert back["round"] == [1, None, None]
    assert {"mine", "sparse", ("key", 1)}.isdisjoint(back)
    # Each tensor has its own memory, shared with neither the file under it nor the other tensors.
    assert back["half"].untyped_storage().nbytes() == 2 * 4
    (save.path / "tensors.safetensors").write_bytes(b"")
    assert torch.equal(back["model"]["image"], image)


def test_oversized_plain_values_are_rejected_on_writing(tmp_path, monkeypatch):
    with CheckpointFolder(tmp_path / "saves") as saves:
        saves.write("test", 1, {"": pack(torch, {"x": 1})})
        monkeypatch.setattr(disk, "MAX_JSON_VALUES", 5000)
        monkeypatch.setattr(disk, "MAX_JSON_BYTES", 1 << 20)
        for many in ([[None] * 1000] * 5, b"x" * (1 << 20)):
            with pytest.raises(CheckpointError, match="keep large ones in tensors"):
                saves.write("test", 2, {"": pack(torch, many)})
        save, bad = saves.newest()
    assert (save.step, bad) == (1, [])
    assert sorted(each.name for each in (tmp_path / "saves").iterdir()) == ["lock", "step-00000001"]
    packed = pack(
        torch, {"permutation": list(range(100_000)), "array": numpy.arange(1000.0)}
    )  # many numbers take few words
    assert len(json.dumps(packed.tree)) < 1_100_000
    assert unpack(torch, pack(torch, [-(10**5000)]).tree, {}) == [
        -(10**5000)
    ]  # more digits than Python writes or reads
    assert list(packed.tensors) == ["array"]


def lying(head, body=bytes(64), length=None):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        lying({}, length=2**63),
        lying({}, length=10**9),
        lying(b"[" * 100_000),
        lying(b"[" + b"[]," * 5_000_000 + b"1]", b""),
        lying(b"\xff\xfe"),
        lying({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 60]}}),
        lying({"a": {"dtype": "F32", "shape": [-16], "data_offsets": [0, 64]}}),
        lying({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]}}),
        lying({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64]}}),
        lying({"a": {"dtype": "F32", "shape": [15], "data_offsets": [4, 64]}}),
        lying({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}),
        lying(
            {
                "a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},
                "b": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]},
            }
        ),
        lying({"a": {"dtype": "O", "shape": [16], "data_offsets": [0, 64]}}),
        lying({"a": {"dtype": "F32", "shape": [1.0] * 3, "data_offsets": [0, 64]}}),
        lying({"a": {"dtype": "F32", "shape": [1] * 1000 + [16], "data_offsets": [0, 64]}}),
        lying({"a": {"dtype": ["F32"], "shape": 3, "data_offsets": None}}),
        lying(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,64]}}'),
    ],
)
def test_an_invalid_header_is_rejected(tmp_path, data):
    path = tmp_path / "t.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        read_tensors(torch, path, FileDigest(len(data), hashlib.sha256(data).hexdigest()))


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": "nothing", "dtype": "float32", "shape": []},
        {"tensor": "t", "dtype": "system", "shape": [4]},
        {"tensor": "t", "dtype": "__class__", "shape": [4]},
        {"tensor": "t", "dtype": "float32", "shape": [2**70]},
        {"tensor": "t", "dtype": "float32", "shape": [4], "order": [1]},
        {"tensor": [], "dtype": 1, "shape": 1},
        {"array": ["O", [1], "AAAAAAAAAAA="]},
        {"array": ["i4,O", [1], "AAAAAAAAAAAAAAAA"]},
        {"array": ["<f8", [10**18], ""]},
        {"scalar": ["V99999999999", ""]},
        {"default": ["__import__", []]},
        {"default": [[], []]},
        {"deque": [[], -1]},
        {"float": "1e5"},
        {"int": "zz"},
        {"ints": ["eval", ""]},
        {"ints": ["list", "AAA="]},
        {"large": 3},
        {"size": ["x"]},
        {"device": "rm -rf"},
        {"unknown": 1},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"a": 1, "b": 2},
        {"complex": [1, 2, 3]},
        {"bytes": "é"},
        {"range": [1, 2, 0]},
        {"set": [[]]},
        {"dict": 5},
        1j,
    ],
    ids=str,
)
def test_an_invalid_tree_is_rejected(tree):
    with pytest.raises(CheckpointError, match="cannot be read"):
        unpack(torch, tree, {"t": torch.zeros(4)})


def test_a_manifest_is_exactly_what_was_written():
    text = Manifest("loop", 3, {}, {"a": "b"}, {"torch": "2", "nested": {"x": [1.5]}}).to_text().encode()
    assert Manifest.from_text(text).step == 3
    for changed in (
        text + b"\n",
        text.replace(b'"step": 3', b'"step": 4'),
        text.replace(b"\n", b"\r\n"),
        text.replace(b'"kind"', b'"kind": "x", "kind"'),
        b"\xff" + text,
        b"",
        b"{}",
        b"[]",
        b"null",
        b"[" * 10**6,
        b"1" * 10**6,
        text.replace(b'"flatout_save": 1', b'"flatout_save": 2'),
        text.replace(b"3", b"NaN", 1),
    ):
        with pytest.raises(CheckpointError, match="its manifest"):
            Manifest.from_text(changed)
    for name in ("../x", "/etc/passwd", ".hidden", "a/b", "", "x" * 200, "a\0b"):
        with pytest.raises(CheckpointError, match="changed"):
            Manifest.from_text(Manifest("loop", 3, {name: FileDigest(0, "0" * 64)}).to_text().encode())


def test_tensors_are_written_without_a_second_copy(tmp_path):
    """Python itself allocates little while 64 MiB are written: the bytes come from the tensor's
    own memory.
    """
    import tracemalloc

    tensors = {"a": torch.zeros(1 << 24)}
    tracemalloc.start()
    stored = write_tensors(tmp_path / "t", tensors)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert stored.bytes > 1 << 26
    assert sys.getsizeof(stored) < 1000


def test_cuda_is_not_initialised_in_a_process_without_it(monkeypatch):
    """Asking for a device starts the driver, and children forked afterwards cannot use it."""

    def asked(*_):
        raise AssertionError("CUDA was queried")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("is_available", "device_count", "get_device_name", "get_rng_state_all"):
        monkeypatch.setattr(torch.cuda, name, asked)
    assert "cuda" not in random_states(torch)
    assert environment(torch)["devices"] == []
