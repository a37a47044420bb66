"""Mistakes that a card punishes or hides, each made on purpose. Prints the result of each as JSON."""

import json
import warnings

import torch

warnings.filterwarnings("ignore")
DEVICE = torch.device("cuda:0")
MISTAKES = {}


def mistake(function):
    MISTAKES[function.__name__] = function
    return function


@mistake
def tensors_of_two_cards():
    return torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


@mistake
def a_tensor_left_on_the_host():
    return torch.nn.functional.linear(torch.ones(2, 2, device=DEVICE), torch.ones(2, 2))


@mistake
def a_time_before_its_event_was_waited_for():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.ones(2, device=DEVICE).add_(1)
    end.record()
    return start.elapsed_time(end)


@mistake
def a_time_between_two_cards():
    marks = []
    for card in range(2):
        with torch.cuda.device(card):
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1])


@mistake
def an_event_on_another_cards_stream():
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(0))
    event.record(torch.cuda.current_stream(1))


@mistake
def a_result_read_before_it_arrived():
    pinned = torch.zeros(4).pin_memory()
    pinned.copy_(torch.full((4,), 3.0, device=DEVICE), non_blocking=True)
    early = pinned.clone()
    torch.cuda.synchronize()
    assert pinned.tolist() == [3.0] * 4
    assert early.isnan().all(), "a value was read before it existed"
    raise RuntimeError("NaN until it arrived")


@mistake
def a_buffer_used_again_too_early():
    pinned = torch.ones(4).pin_memory()
    sent = pinned.to(DEVICE, non_blocking=True)
    pinned.zero_()
    torch.cuda.synchronize()
    return sent


@mistake
def more_memory_than_there_is():
    return torch.empty(1 << 40, dtype=torch.uint8, device=DEVICE)


@mistake
def a_read_while_a_graph_is_recorded():
    value = torch.ones(2, device=DEVICE)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        return value.sum().item()


@mistake
def a_recorded_stream_that_does_not_come_back():
    side = torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.ones(2, device=DEVICE).add_(1)


@mistake
def recorded_work_that_waits_for_other_work():
    event = torch.cuda.Event()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.ones(2, device=DEVICE).add_(1)
        event.record()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.current_stream().wait_event(event)
        torch.ones(2, device=DEVICE).add_(1)


@mistake
def an_output_kept_over_a_replay():
    given = torch.zeros(2, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = given + 1
    graph.replay()
    kept = output
    assert kept.tolist() == [1, 1]
    given.fill_(5)
    graph.replay()
    if kept.tolist() == [6, 6]:
        raise RuntimeError("the output that was kept has been overwritten")


@mistake
def work_done_while_it_is_only_recorded():
    weight = torch.zeros(2, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.add_(1)
    assert weight.tolist() == [0, 0], "it was computed while it was recorded"
    graph.replay()
    graph.replay()
    if weight.tolist() == [2, 2]:
        raise RuntimeError("nothing was computed before the replay")


@mistake
def a_kernel_that_nothing_stands_in_for():
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()


@mistake
def random_numbers_of_another_seed():
    torch.manual_seed(1)
    first, second = torch.randn(4, device=DEVICE), torch.randn(4, device=DEVICE)
    torch.manual_seed(1)
    assert torch.equal(first, torch.randn(4, device=DEVICE))
    state = torch.cuda.get_rng_state()
    assert torch.equal(second, torch.randn(4, device=DEVICE))
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.randn(4, device=DEVICE))
    if not torch.equal(first, second):
        raise RuntimeError("the generator moved on, and went back with its state")


def main():
    came = {}
    for name, made in MISTAKES.items():
        try:
            made()
            came[name] = ""
        except (RuntimeError, AssertionError) as error:
            came[name] = f"{type(error).__name__}: {error}"
    for _ in range(3):
        torch.ones(2, device=DEVICE).sum().item()  # a read in every step
    print(json.dumps(came))


if __name__ == "__main__":
    main()
