"""A deferred image answers what is certain, and becomes the real image when its content is read."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")

from feeding import difference, pil_images
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from flatout.agent.ledger import Ledger
from flatout.data.deferred import is_deferred
from flatout.data.deferring import BatchRecorder
from flatout.data.observing import CallObserver, PipelineReader
from flatout.data.pipelines import INTERCEPTION, Pipelines, recording
from flatout.data.streams import preserve_states

IMAGES = pil_images(6)
TENSOR = v1.Compose([v1.RandomCrop(9, padding=1), v1.RandomHorizontalFlip(), v1.ToTensor()])
IMAGE, TO_TENSOR = v1.RandomCrop((8, 9)), v1.ToTensor()
TV = v2.Compose([v2.RandomCrop(9), v2.ToImage()])


@pytest.fixture(scope="module", autouse=True)
def intercepted():
    ledger = Ledger()
    INTERCEPTION.enable(ledger)
    yield
    ledger.restore()


@pytest.fixture(scope="module")
def pipelines():
    """Pipelines of the three transforms above, whose images then become a tensor."""
    found, observer = Pipelines(), CallObserver((), on_copies=True)
    with preserve_states():
        with recording(observer):
            for image in IMAGES[:3]:
                TENSOR(image)
                TV(image)
                TO_TENSOR(IMAGE(image))
        assert PipelineReader(batched=True, light=False, keeping=False).add(found, observer.calls) == []
    for pipeline in found:
        pipeline.proved = True
    return found


def both(transform, pipelines, use, images=IMAGES[:1]):
    """The result of ``use`` on plain images and on deferred ones, with the types of the images and the final
    generator state.
    """
    torch.manual_seed(4)
    plain = [transform(image) for image in images]
    found = use(plain[0]), [type(image) for image in plain], plain, torch.get_rng_state()
    torch.manual_seed(4)
    recorder = BatchRecorder(pipelines, draw_now=True)
    with recording(recorder):
        images = [transform(image) for image in images]
        assert all(map(is_deferred, images))
        other = use(images[0])
        recorder.close()
    return found, (other, [type(image) for image in images], images, torch.get_rng_state())


def in_file(x):
    torch.save(x, file := io.BytesIO())
    with torch.serialization.safe_globals([tv_tensors.Image]):
        return torch.load(io.BytesIO(file.getvalue()))


USES = {
    "add": lambda x: x + 1,
    "added to": lambda x: torch.ones(3, 9, 9) + x,
    "in place": lambda x: x.add_(1),
    "item": lambda x: x[0, 0, 0].item(),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "array": lambda x: torch.from_numpy(np.asarray(x)),
    "list": lambda x: x.tolist(),
    "print": repr,
    "copy": copy.copy,
    "deep": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "file": in_file,
    "iteration": list,
    "unpacked": lambda x: [*x][1],
    "cat": lambda x: torch.cat([x, x]),
    "nested": lambda x: torch.nn.functional.pad(x, (1, 1)),
    "shared": lambda x: x.share_memory_(),
    "to": lambda x: x.to(torch.float64),
    "compare": lambda x: x == x,
    "bool": lambda x: bool(x.sum()),
    "strides": lambda x: x.stride(),
    "data": lambda x: x.data,
    "stack": lambda x: torch.stack([x]),
    "stack, last": lambda x: torch.stack([x, x], -1),
    "stack, mixed": lambda x: torch.stack([torch.zeros(x.shape, dtype=x.dtype), x]),
    "out": lambda x: torch.stack([x, x], out=torch.empty(0, dtype=x.dtype)),
    "hash": lambda x: x in {x: 1},
    "flattened": lambda x: x.reshape(-1),
    "sent": lambda x: len(bytes(ForkingPickler.dumps(x))) > 0,
    "grad": lambda x: x.grad,
    "detach": lambda x: x.detach(),
    "assigned": lambda x: torch.zeros(2, *x.shape, dtype=x.dtype).__setitem__(0, x),
    "flip": v1.functional.hflip,
    "pointer": lambda x: x.data_ptr() != 0,
    "leaf": lambda x: x.is_leaf,
}


@pytest.mark.parametrize("transform", [TENSOR, TV], ids=["tensor", "tv"])
@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_is_read_is_the_real_one(use, transform, pipelines):
    if (use, transform) == ("stack", TV):
        return  # of one image: it stays deferred until the batch ends
    plain, other = both(transform, pipelines, USES[use])
    assert difference(plain[0], other[0]) == ""
    assert plain[1] == other[1] == [torch.Tensor if transform is TENSOR else tv_tensors.Image]
    assert (
        difference(
            [x.as_subclass(torch.Tensor) for x in plain[2]], [x.as_subclass(torch.Tensor) for x in other[2]]
        )
        == ""
    )
    assert torch.equal(plain[3], other[3])


CERTAIN = {
    "shape": lambda x: x.shape,
    "size": lambda x: (x.size(), x.size(1), x.size(-1)),
    "dim": lambda x: (x.dim(), x.ndim, len(x)),
    "dtype": lambda x: x.dtype,
    "numel": lambda x: (x.numel(), x.nelement()),
    "floats": lambda x: (x.is_floating_point(), torch.is_floating_point(x)),
    "device": lambda x: x.device,
    "kind": lambda x: (
        torch.is_tensor(x),
        isinstance(x, torch.Tensor),
        x.layout,
        x.is_cuda,
        x.is_sparse,
        x.is_nested,
        x.requires_grad,
    ),
}


@pytest.mark.parametrize("transform", [TENSOR, TV], ids=["tensor", "tv"])
@pytest.mark.parametrize("question", CERTAIN)
def test_certain_answers_need_no_computation(question, transform, pipelines):
    still = []

    def ask(x):
        answer = CERTAIN[question](x)
        still.append(is_deferred(x))
        return answer

    plain, other = both(transform, pipelines, ask)
    assert plain[0] == other[0]
    assert still == [False, True]


IMAGE_USES = {
    "pixels": lambda x: np.asarray(x).tolist(),
    "size": lambda x: (x.size, x.mode),
    "width": lambda x: (x.width, x.height),
    "pixel": lambda x: x.getpixel((1, 2)),
    "bytes": lambda x: x.tobytes(),
    "equal": lambda x: (x == x.copy(), x != x.copy()),
    "copy": lambda x: copy.copy(x).tobytes(),
    "class": lambda x: x.__class__,
    "deep": lambda x: copy.deepcopy(x).tobytes(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).tobytes(),
    "convert": lambda x: x.convert("L").tobytes(),
    "paste": lambda x: x.paste((0, 0, 0), (0, 0, 4, 4)),
    "kind": lambda x: isinstance(x, Image.Image),
    "attribute": lambda x: setattr(x, "name", 3) or x.name,
    "bands": lambda x: x.getbands(),
    "info": lambda x: x.info,
    "tensor": v1.functional.to_tensor,
    "palette": lambda x: x.palette,
    "flip": v1.functional.hflip,
}


@pytest.mark.parametrize("use", IMAGE_USES)
def test_an_image_that_is_read_is_the_real_one(use, pipelines):
    plain, other = both(IMAGE, pipelines, IMAGE_USES[use])
    if isinstance(plain[0], Image.Image):
        assert plain[0] == other[0]
    else:
        assert difference(plain[0], other[0]) == ""
    assert plain[1] == other[1] == [Image.Image]
    assert plain[2][0] == other[2][0]
    assert vars(plain[2][0]).keys() == vars(other[2][0]).keys()


def test_an_image_knows_its_size_without_computing(pipelines):
    recorder = BatchRecorder(pipelines, draw_now=True)
    with recording(recorder):
        pil_image = IMAGE(IMAGES[0])
        assert (pil_image.size, pil_image.mode) == ((9, 8), "RGB")
        assert is_deferred(pil_image)
        x = TO_TENSOR(pil_image)
        assert is_deferred(x)
        assert is_deferred(pil_image)
        recorder.close()
    assert type(x) is torch.Tensor
    assert torch.equal(x, v1.functional.to_tensor(pil_image))


@settings(max_examples=40)
@given(
    order=st.permutations(range(6)),
    taken=st.integers(1, 6),
    looked=st.sets(st.integers(0, 5)),
    draw_now=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_images_in_any_order_make_the_plain_batch(pipelines, order, taken, looked, draw_now, seed):
    """Some of them were read before, from two interleaved pipelines with one generator."""
    torch.manual_seed(seed)
    plain = [
        (TENSOR if at % 3 else TO_TENSOR)(IMAGE(image) if at % 3 == 0 else image)
        for at, image in enumerate(IMAGES)
    ]
    end = torch.get_rng_state()
    torch.manual_seed(seed)
    recorder = BatchRecorder(pipelines, draw_now=draw_now)
    with recording(recorder):
        images = [
            (TENSOR if at % 3 else TO_TENSOR)(IMAGE(image) if at % 3 == 0 else image)
            for at, image in enumerate(IMAGES)
        ]
        for at in looked:
            images[at].sum()
        assert recorder.draw_pending()
        chosen = [at for at in order if at % 3][:taken]
        batch = torch.stack([images[at] for at in chosen])
        assert torch.equal(batch, torch.stack([plain[at] for at in chosen]))
        assert all(is_deferred(images[at]) == looked.isdisjoint(chosen) for at in chosen if at not in looked)
        batch.zero_()
        recorder.close()
    assert all(torch.equal(x, y) and type(y) is torch.Tensor for x, y in zip(plain, images, strict=True))
    assert torch.equal(end, torch.get_rng_state())


def test_pixels_that_change_after_the_call(pipelines):
    image = IMAGES[0].copy()
    torch.manual_seed(1)
    plain = TENSOR(image)
    torch.manual_seed(1)
    recorder = BatchRecorder(pipelines, draw_now=True)
    with recording(recorder):
        x = TENSOR(image)
        image.paste((0, 0, 0), (0, 0, 13, 11))
        image.close()
        recorder.close()
    assert torch.equal(plain, x)


def test_images_of_a_pipeline_that_is_not_proved_hold_their_data(pipelines):
    """Code that bypasses torch's own protocol sees the image as well, and the pipeline notices that it has
    lost one.
    """
    pipeline = next(pipeline for pipeline in pipelines if pipeline.transform is TENSOR)
    pipeline.proved = False
    try:
        torch.manual_seed(1)
        plain = TENSOR(IMAGES[0])
        torch.manual_seed(1)
        recorder = BatchRecorder(pipelines, draw_now=True)
        with recording(recorder), pytest.warns(UserWarning, match="To copy construct"):
            copy_image = torch.tensor(TENSOR(IMAGES[0]))
        assert torch.equal(plain, copy_image)
        assert recorder.close() == [pipeline]
        assert not pipeline.proved
    finally:
        pipeline.proved = True
