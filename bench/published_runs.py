"""Published trainings on many devices, and the inputs of a prediction of each.

The inputs are hardware, batch, parameters, and the time of one device. If a publication does not say how a
step divides, forward is one third of forward and backward. The optimizer time is left at 0, which favours no
strategy. Two runs set one constant each and are not counted: ResNet-50 on 2 V100 sets ``OVERHEAD`` of
`flatout scale`, BERT-large in float32 on 8 V100 sets the contention of NVLink. Nothing was fitted to any
other figure here.

Sources
    [ddp]    pytorch/pytorch, benchmarks/distributed/ddp/README.md, commit bf69c14: torch 1.4, DGX-1 with 8
             V100 each, 4 x 100 Gb/s InfiniBand a machine, p50
    [dle-r]  NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md: NGC 21.03;
             DGX A100 (8 A100 80 GB), DGX-1 (8 V100 16 GB); gradients in float32 under native AMP too; images
             a GPU from ConvNets/configs.yml
    [dle-x]  the same, ConvNets/resnext101-32x4d/README.md
    [dle-b]  NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md, commit 23a6382: NGC 19.07,
             fine-tuning of BERT-large (SQuAD), DGX-1 (8 V100 16 GB) and DGX-2 (16 V100 32 GB); mixed
             precision has float16 gradients (apex)
    [gpt]    rasbt/LLMs-from-scratch, ch05/10_llm-training-speed: GPT-2 124M with an output layer of its own,
             all in bfloat16, 32 x 1024 tokens, 4 A100. DDP wraps a compiled model, so all gradients come at
             the end of one compiled backward (docs.pytorch.org, torch.compiler_faq, "Do you support
             Distributed code?") and nothing overlaps. Its tokens/s include an evaluation (two forward
             passes): every 10 steps on one GPU, every 5 on four. The publication does not name the links
    [titan]  pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (arXiv 2410.06511): Llama 3.1 8B,
             2 x 8192 tokens a GPU, FSDP2 (bfloat16 gathered, float32 reduced), 8 H100 a host, 400 Gb/s a GPU.
             The figure compares 128 GPUs with 8: the model does not fit on one
    [trainy] pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: the same model in
    float8 (gathered too), 8 H200 a host, 64 compared with 32
Parameters: torchvision's documentation (ResNet, ResNeXt), Devlin et al. 2018 and its SQuAD head (BERT-large),
Llama 3.1 model card.
"""

from __future__ import annotations

from dataclasses import dataclass

from provenance import SRC  # noqa: F401  puts src on the path

from flatout.measure.links import Fabric
from flatout.measure.scaling import Workload, equal_tensors, predict
from flatout.schema.scale import NETWORKS, Timing, read_link

PARAMETERS = {
    "ResNet-50": 25.557e6,
    "ResNet-101": 44.549e6,
    "ResNeXt-50": 25.029e6,
    "ResNeXt-101 32x8d": 88.791e6,
    "ResNeXt-101 32x4d": 44.18e6,
    "BERT-large": 335.1e6,
    "GPT-2 124M": 163.0e6,
    "Llama 3.1 8B": 8.03e9,
}
V100 = Fabric(read_link("ib-edr,cards=4"), NETWORKS["nvlink2"], 8)
DGX2 = Fabric(NETWORKS["nvlink2"])
A100 = Fabric(NETWORKS["nvlink3"])
PCIE = Fabric(NETWORKS["pcie4"])
H100 = Fabric(NETWORKS["ib-ndr"], NETWORKS["nvlink4"], 8)
LLAMA_TOKENS = 2 * 8192


@dataclass(frozen=True, eq=False)
class Run:
    """A published run: ``alone_ms`` is a step on ``base`` devices, ``efficiency`` that of ``devices``.

    ``gathered`` and ``reduced`` are bytes a parameter. ``outside_ms`` is time in the published figure other
    than training: on ``base`` and on ``devices``.
    """

    name: str
    source: str
    model: str
    fabric: Fabric
    devices: int
    alone_ms: float
    efficiency: float
    strategy: str = "ddp"
    base: int = 1
    gathered: float = 4.0
    reduced: float = 4.0
    overlap: bool = True
    outside_ms: tuple[float, float] = (0.0, 0.0)
    counted: bool = True
    note: str = ""

    def without_links(self, overhead: float) -> float:
        """Returns the efficiency from the overhead alone, without any knowledge of bytes."""
        return 1.0 if self.base > 1 else 1 / (1 + overhead)

    def predicted(self, overhead: float) -> float:
        """Returns the efficiency on ``devices`` relative to ``base``."""
        parameters = PARAMETERS[self.model]
        alone_ms = self.alone_ms - self.outside_ms[0]
        work = Workload(
            Timing(alone_ms / 3, 2 * alone_ms / 3, 0.0),
            equal_tensors(self.reduced * parameters),
            self.gathered * parameters,
            overhead=overhead,
            overlap=self.overlap,
        )
        few, many = (
            predict(work, self.fabric, self.strategy, count).step_ms or 0.0
            for count in (self.base, self.devices)
        )
        return (few + self.outside_ms[0]) / (many + self.outside_ms[1])


def _ddp_benchmark(model: str, alone_ms: float, eight_ms: float, sixteen_ms: float) -> list[Run]:
    return [
        Run(f"{model}, {count} V100", "ddp", model, V100, count, alone_ms, alone_ms / many_ms)
        for count, many_ms in ((8, eight_ms), (16, sixteen_ms))
    ]


def _throughput(
    name: str,
    source: str,
    model: str,
    fabric: Fabric,
    devices: int,
    batch: int,
    alone: float,
    many: float,
    reduced: float = 4.0,
) -> Run:
    return Run(
        name, source, model, fabric, devices, 1000 * batch / alone, many / alone / devices, reduced=reduced
    )


SETS_OVERHEAD = Run(
    "ResNet-50, 2 V100", "ddp", "ResNet-50", V100, 2, 97.0, 97 / 103, counted=False, note="sets the overhead"
)
SETS_CONTENTION = Run(
    "BERT-large float32, 8 V100, batch 4",
    "dle-b",
    "BERT-large",
    V100,
    8,
    4000 / 8.96,
    64.64 / 8.96 / 8,
    counted=False,
    note="sets the contention of NVLink",
)
GPT_MS = 1000 * 32 * 1024 / 142156
GPT_FORWARD_MS = GPT_MS / 3 / (1 + 0.2 / 3)  # a step includes a fifth of two forward passes


def _gpt(name: str, fabric: Fabric) -> Run:
    return Run(
        name,
        "gpt",
        "GPT-2 124M",
        fabric,
        4,
        GPT_MS,
        419259 / 142156 / 4,
        reduced=2.0,
        overlap=False,
        outside_ms=(2 * GPT_FORWARD_MS / 10, 2 * GPT_FORWARD_MS / 5),
        counted=False,
        note="the link is not named",
    )


RUNS = [
    SETS_OVERHEAD,
    SETS_CONTENTION,
    *_ddp_benchmark("ResNet-50", 97, 104, 104),
    *_ddp_benchmark("ResNet-101", 162, 179, 179),
    *_ddp_benchmark("ResNeXt-50", 145, 157, 157),
    *_ddp_benchmark("ResNeXt-101 32x8d", 415, 447, 450),
    _throughput("ResNet-50 TF32, 8 A100", "dle-r", "ResNet-50", A100, 8, 256, 938, 7248),
    _throughput("ResNet-50 AMP, 8 A100", "dle-r", "ResNet-50", A100, 8, 256, 2470, 16621),
    _throughput("ResNet-50 float32, 8 V100", "dle-r", "ResNet-50", V100, 8, 112, 367, 7.76 * 367),
    _throughput("ResNet-50 AMP, 8 V100", "dle-r", "ResNet-50", V100, 8, 256, 1200, 6.93 * 1200),
    _throughput("ResNeXt-101 TF32, 8 A100", "dle-x", "ResNeXt-101 32x4d", A100, 8, 128, 456, 3471),
    _throughput("ResNeXt-101 AMP, 8 A100", "dle-x", "ResNeXt-101 32x4d", A100, 8, 128, 1211, 7925),
    _throughput("ResNeXt-101 float32, 8 V100", "dle-x", "ResNeXt-101 32x4d", V100, 8, 64, 147, 1133),
    _throughput("ResNeXt-101 AMP, 8 V100", "dle-x", "ResNeXt-101 32x4d", V100, 8, 128, 587, 4065),
    _throughput("BERT-large mixed, 8 V100, batch 4", "dle-b", "BERT-large", V100, 8, 4, 35.88, 227.84, 2.0),
    _throughput("BERT-large mixed, 8 V100, batch 10", "dle-b", "BERT-large", V100, 8, 10, 45.2, 327.2, 2.0),
    _throughput(
        "BERT-large float32, 8 V100 of 32 GB, batch 8", "dle-b", "BERT-large", V100, 8, 8, 8.64, 64.32
    ),
    _throughput(
        "BERT-large mixed, 8 V100 of 32 GB, batch 8", "dle-b", "BERT-large", V100, 8, 8, 36.04, 231.04, 2.0
    ),
    _throughput(
        "BERT-large mixed, 8 V100 of 32 GB, batch 10", "dle-b", "BERT-large", V100, 8, 10, 46.0, 325.6, 2.0
    ),
    _throughput("BERT-large float32, 16 V100, batch 4", "dle-b", "BERT-large", DGX2, 16, 4, 9.92, 141.4),
    _throughput("BERT-large mixed, 16 V100, batch 4", "dle-b", "BERT-large", DGX2, 16, 4, 38.16, 462.08, 2.0),
    _throughput("BERT-large mixed, 16 V100, batch 10", "dle-b", "BERT-large", DGX2, 16, 10, 47.4, 648.0, 2.0),
    _gpt("GPT-2 124M, 4 A100, were they on PCIe", PCIE),
    _gpt("GPT-2 124M, 4 A100, were they on NVLink", A100),
    *(
        Run(
            f"Llama 3.1 8B{name}, 128 H100 against 8",
            "titan",
            "Llama 3.1 8B",
            H100,
            128,
            1000 * LLAMA_TOKENS / eight,
            many / eight,
            "fsdp",
            8,
            gathered,
        )
        for name, eight, many, gathered in (
            ("", 5762, 5605, 2.0),
            (" compiled", 6667, 6514, 2.0),
            (" float8", 8532, 8380, 2.0),
        )
    ),
    Run(
        "Llama 3.1 8B float8, 64 H200 against 32",
        "trainy",
        "Llama 3.1 8B",
        H100,
        64,
        1000 * LLAMA_TOKENS / 10938,
        10753 / 10938,
        "fsdp",
        32,
        1.0,
    ),
]
