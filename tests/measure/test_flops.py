"""FLOPs from recorded shapes, compared with those that torch counts over the tensors themselves."""

import pytest

from flatout.measure.operations import flops_of

torch = pytest.importorskip("torch")


def counted(call):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())


def test_products():
    a, b, c = torch.ones(6, 10), torch.ones(10, 7), torch.ones(7)
    assert flops_of("aten::mm", [[6, 10], [10, 7]]) == counted(lambda: a @ b)
    assert flops_of("aten::addmm", [[7], [6, 10], [10, 7], [], []]) == counted(lambda: torch.addmm(c, a, b))
    assert flops_of("aten::bmm", [[4, 6, 10], [4, 10, 7]]) == counted(
        lambda: torch.bmm(a.expand(4, 6, 10), b.expand(4, 10, 7))
    )


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"), [(1, 0, 1, 1), (2, 3, 1, 1), (1, 2, 2, 1), (2, 1, 1, 4)]
)
def test_convolution(stride, padding, dilation, groups):
    x, weight = torch.ones(2, 8, 19, 17), torch.ones(12, 8 // groups, 3, 3)
    truth = counted(lambda: torch.conv2d(x, weight, None, stride, padding, dilation, groups))
    given = [
        "",
        "",
        "",
        f"[{padding}, {padding}]",
        f"[{stride}, {stride}]",
        f"[{dilation}, {dilation}]",
        str(groups),
    ]
    assert (
        flops_of("aten::mkldnn_convolution", [list(x.shape), list(weight.shape), [], [], [], [], []], given)
        == truth
    )
    out = torch.conv2d(x, weight, None, stride, padding, dilation, groups)
    given = ["", "", "", "", "", "", "", "", "", "", "[True, True, False]"]
    backward = flops_of(
        "aten::convolution_backward", [list(out.shape), list(x.shape), list(weight.shape)], given
    )
    assert backward == 2 * truth  # the gradients of the input and of the weight


def test_attention():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k = (2, 4, 16, 8), (2, 4, 24, 8)
    assert flops_of("aten::_scaled_dot_product_flash_attention_for_cpu", [q, k, k]) == sdpa_flop_count(
        q, k, k
    )
    assert flops_of(
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward", [q, q, k, k]
    ) == sdpa_backward_flop_count(q, q, k, k)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::add", [[3], [3]]),
        ("aten::mm", []),
        ("aten::mm", [[2, 3], [4, 5]]),
        ("aten::mkldnn_convolution", [[], []]),
    ],
)
def test_unknown_flops_are_none(name, shapes):
    assert flops_of(name, shapes) is None
