"""What a dying process on a GPU would know.

These records are hand-made because there is no GPU to die on; the real ones are marked and need a GPU.
"""

import pytest

from flatout.agent.failure_details import record_failure
from flatout.diagnose.explain import explain
from flatout.schema.failure import ExceptionRecord, FailureRecord, FrameRecord, ModuleRecord, TensorRecord

GIB = 1 << 30
ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API call."
NAMES = ["AcceleratorError", "RuntimeError", "Exception"]


def frame(function, text, *tensors, is_user_code=True):
    return FrameRecord(
        "/home/me/train.py" if is_user_code else "/lib/python3.12/site-packages/torch/nn/functional.py",
        7,
        function,
        text,
        is_user_code,
        list(tensors),
    )


def test_a_bad_label_that_is_still_on_the_cpu():
    """The GPU's copy is unreadable by then.

    The loader's batch on the CPU is readable and gives label, place and batch.
    """
    labels = TensorRecord("labels", [64], "int64", "cpu", low=0, high=10, argmin=[3], argmax=[41])
    moved = TensorRecord("target", [64], "int64", "cuda:0")
    logits = TensorRecord("input", [64, 10], "float32", "cuda:0", requires_grad=True)
    failure = FailureRecord(
        [
            ExceptionRecord(
                "torch.AcceleratorError",
                NAMES,
                ASSERT,
                [],
                [
                    frame("step", "loss = F.cross_entropy(model(x), labels.cuda())", labels),
                    frame("cross_entropy", "return torch._C...", logits, moved, is_user_code=False),
                ],
            )
        ],
        live=True,
        batch=12,
    )
    finding = explain(failure)
    assert finding is not None
    assert finding.rule == "FE035"
    assert (
        finding.message
        == "the label 10 (`labels` at [41], in batch 12 of the loader) is not a class: the model has 10 outputs (0 to 9)"
    )
    assert finding.fix.splitlines()[0].startswith("target = target - 1")
    assert finding.place is not None
    assert finding.place.line == 7


def test_no_label_in_range_is_blamed():
    """-100 is torch's own mark for "no label"."""
    labels = TensorRecord("labels", [64], "int64", "cpu", low=-100, high=9, argmin=[0], argmax=[1])
    logits = TensorRecord("input", [64, 10], "float32", "cuda:0")
    failure = FailureRecord(
        [
            ExceptionRecord(
                "torch.AcceleratorError",
                NAMES,
                ASSERT,
                [],
                [
                    frame("step", "loss = f(labels)", labels),
                    frame("cross_entropy", "...", logits, is_user_code=False),
                ],
            )
        ],
        live=True,
    )
    finding = explain(failure)
    assert finding is not None
    assert "-100" not in finding.message
    assert "the real error may be before the line below" in finding.message


MESSAGE = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 GiB is free. Process 77 has "
    "3.00 GiB memory in use. Including non-PyTorch memory, this process has 20.00 GiB memory in use. Of the allocated memory 18.00 GiB is allocated "
    "by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 1.00 GiB is reserved by PyTorch but unallocated."
)


def test_the_batch_that_would_fit():
    """Weights and optimizer do not grow with the batch; the rest does."""
    batch = TensorRecord("images", [64, 3, 224, 224], "float32", "cuda:0")
    thrown = ExceptionRecord(
        "torch.OutOfMemoryError",
        ["OutOfMemoryError", "RuntimeError"],
        MESSAGE,
        [],
        [frame("step", "loss = model(images)", batch)],
    )
    failure = FailureRecord(
        [thrown],
        live=True,
        module=ModuleRecord("model.layer4.1", "Bottleneck"),
        memory={
            "free": GIB,
            "total": 24 * GIB,
            "allocated": 18 * GIB,
            "reserved": 19 * GIB,
            "parameters": 2 * GIB,
            "gradients": 2 * GIB,
            "optimizer state": 4 * GIB,
        },
    )
    finding = explain(failure)
    assert finding is not None
    assert (
        finding.message
        == "the GPU's memory is full: 4.00 GiB more were requested in `model.layer4.1` (Bottleneck), and 1.00 GiB of 24.0 GiB are free"
    )
    assert "torch holds 18.0 GiB in tensors and 1.00 GiB reserved but unallocated" in finding.evidence
    assert "other processes hold 3.00 GiB of this GPU: `nvidia-smi` names them" in finding.evidence
    assert (
        "parameters 2.00 GiB, gradients 2.00 GiB, optimizer state 4.00 GiB, activations and the rest 10.0 GiB"
        in finding.evidence
    )
    # 10 GiB grow with 64 samples and 4 more were requested; there is room for 12 of the 14.
    assert "at most 54 of 64 samples fit at once, fewer if the step's peak comes later" in finding.evidence
    assert len(finding.fix.splitlines()) == 3
    assert "expandable_segments" not in finding.fix


def test_fragmentation_is_named_first_where_it_would_suffice():
    message = MESSAGE.replace("4.00 GiB. GPU", "1.50 GiB. GPU")
    finding = explain(
        FailureRecord(
            [ExceptionRecord("torch.OutOfMemoryError", ["OutOfMemoryError", "RuntimeError"], message)]
        )
    )
    assert finding is not None
    assert finding.fix.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True")


@pytest.mark.gpu
def test_a_real_one_out_of_memory():
    import torch

    model = torch.nn.Linear(1024, 1024).cuda()
    images = torch.ones(64, 1024, device="cuda")
    try:
        model(images)
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        failure = record_failure(error)
    finding = explain(failure)
    assert finding is not None
    assert finding.rule == "FE040"
    assert failure.memory["parameters"] >= 1024 * 1024 * 4
    assert "are free" in finding.message
