"""Programs beside those of the pages: other forms of a fault, and right programs that come close to it."""

import textwrap

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

BEGIN = """\
import torch
from torch import nn
from torch.nn import functional as F

LAYERS
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
for _ in range(60):
    BATCH
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def program(layers, batch, after=""):
    batch = textwrap.indent(textwrap.dedent(batch).strip(), "    ").lstrip()
    return BEGIN.replace("LAYERS", textwrap.dedent(layers).strip()).replace("BATCH", batch) + textwrap.dedent(
        after
    )


CONSTANT = "for p in model.parameters():\n    nn.init.constant_(p, 0.05)"
MLP = "model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))"
CLASSES = "x = torch.randn(32, 16); loss = F.cross_entropy(model(x), torch.randint(0, 5, (32,)))"
IMAGES = "model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))"
SCALED = (
    "x = torch.randint(0, 256, (16, 1, 8, 8)) / 255; loss = F.mse_loss(model(AS_TRAINED), torch.zeros(16, 5))"
)
EVALUATED = """
model.eval()
with torch.no_grad():
    for _ in range(4):
        x = torch.randint(0, 256, (16, 1, 8, 8)) / 255
        print(F.mse_loss(model(AS_EVALUATED), torch.zeros(16, 5)))
"""


def scaled(trained, evaluated):
    return program(
        IMAGES, SCALED.replace("AS_TRAINED", trained), EVALUATED.replace("AS_EVALUATED", evaluated)
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("FL081", program(MLP + "\n" + CONSTANT, CLASSES)),
        (
            "FL081",
            program(
                "model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))\n"
                + CONSTANT,
                "loss = F.cross_entropy(model(torch.rand(16, 1, 8, 8)), torch.randint(0, 5, (16,)))",
            ),
        ),
        (
            "FL082",
            program(
                """
                model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 5))
                nn.init.constant_(model[0].bias, -9.0)
                """,
                "loss = F.cross_entropy(model(torch.rand(16, 1, 8, 8)), torch.randint(0, 5, (16,)))",
            ),
        ),
        (
            "FL082",
            program(
                "model = nn.Sequential(nn.Linear(16, 1), nn.ReLU())\nnn.init.constant_(model[0].bias, -90.0)",
                "x = torch.randn(128, 16); loss = F.mse_loss(model(x), x.norm(dim=1, keepdim=True))",
            ),
        ),
        (
            "FL083",
            program(
                "model = nn.Sequential(nn.Linear(16, 5), nn.ReLU(inplace=True), nn.LogSoftmax(dim=1))",
                "loss = F.nll_loss(model(torch.randn(32, 16)), torch.randint(0, 5, (32,)))",
            ),
        ),
        (
            "FL083",
            program(
                "model = nn.Sequential(nn.Linear(16, 1), nn.ReLU())",
                "loss = F.binary_cross_entropy_with_logits(model(torch.randn(32, 16)).squeeze(1), torch.rand(32))",
            ),
        ),
        ("FL079", scaled("x", "x * 255")),
        ("FL079", scaled("2 * x - 1", "x")),
    ],
)
def test_another_form_of_a_fault_is_found(observe, code, text):
    seen = observe(text)
    assert (seen["error"], seen["failed"]) == ("", {})
    assert [finding["rule"] for finding in seen["findings"]] == [code]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            program(
                "model = nn.Linear(8, 3)\nnn.init.zeros_(model.weight); nn.init.zeros_(model.bias)",
                "x = torch.randn(32, 8); loss = F.mse_loss(model(x), x.sum(1, keepdim=True).expand(-1, 3))",
            ),
            id="outputs with the same target",
        ),
        pytest.param(
            program(
                """
                model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
                nn.init.zeros_(model[2].weight)
                nn.init.zeros_(model[2].bias)
                """,
                "x = torch.rand(8, 1, 8, 8).expand(-1, 3, -1, -1); loss = F.mse_loss(model(x), x)",
            ),
            id="grey images in three channels",
        ),
        pytest.param(
            program(
                "model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 5))\nnn.init.zeros_(model[0].weight)",
                "x = torch.randint(0, 50, (32,)); loss = F.cross_entropy(model(x), x % 5)",
            ),
            id="an embedding that begins with zeros",
        ),
        pytest.param(
            program(
                MLP, "x = model(torch.randn(64, 16))\nloss = nn.ReLU()(x - 50).mean() + x.square().mean()"
            ),
            id="a hinge loss that is satisfied",
        ),
        pytest.param(
            program(
                "model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU(inplace=True), nn.Linear(64, 5))",
                "loss = F.cross_entropy(model(torch.zeros(8, 16)), torch.randint(0, 5, (8,)))",
            ),
            id="inputs of zeros",
        ),
        pytest.param(
            program(
                "model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten())",
                "loss = F.cross_entropy(model(torch.rand(16, 1, 8, 8)), torch.randint(0, 5, (16,)))",
            ),
            id="the mean of a ReLU as in SqueezeNet",
        ),
        pytest.param(scaled("x + torch.randn_like(x)", "x"), id="noise in training"),
        pytest.param(scaled("x - 0.5 + 0.5 * torch.rand(16, 1, 1, 1)", "x"), id="brightness in training"),
        pytest.param(scaled("x", "x * 0.3"), id="darker images"),
    ],
)
def test_a_right_program_that_comes_close_has_no_finding(observe, text):
    seen = observe(text)
    assert (seen["error"], seen["failed"], seen["findings"]) == ("", {}, [])
