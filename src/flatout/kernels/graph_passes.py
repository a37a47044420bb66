"""Graph passes of levers, as one object of torch's compiler that lets it keep compiled code for other processes."""

from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


class GraphPasses(CustomGraphPass):
    """The key of compiled code holds ``uuid()`` or, as in torch 2.11, the pickled object."""

    def __init__(self, passes: list[Any]) -> None:
        self.passes = tuple(passes)
        self.sources = get_hash_for_files(tuple(map(str, sorted(Path(__file__).parent.glob("*.py")))))

    def __call__(self, graph: Any) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> Any:
        return self.sources, [graph_pass.__qualname__ for graph_pass in self.passes]
