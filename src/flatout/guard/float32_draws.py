"""Lets a float64 copy of a model draw the random numbers of the float32 model.

torch draws other numbers for float64 tensors: in `randn_like`, and on CUDA also in dropout. A step in float64 would
then differ from the float32 step by its random numbers, and could not serve as its reference.
"""

from typing import Any


def float32_draws(torch: Any) -> Any:
    """Return a context in which random operators on float64 tensors draw in float32.

    Each converts what it drew. Operators that draw and also compute, such as fused attention with dropout, run
    unchanged; dropout draws its mask in float32 and multiplies in float64.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    dropout, random_tag = torch.ops.aten.native_dropout.default, torch.Tag.nondeterministic_seeded

    def is_double(value: object) -> bool:
        return value is torch.float64 or (isinstance(value, torch.Tensor) and value.dtype is torch.float64)

    def to_float32(value: Any) -> Any:
        if not is_double(value):
            return value
        return torch.float32 if value is torch.float64 else value.float()

    class Float32Draws(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if random_tag not in func.tags or not any(map(is_double, (*args, *kwargs.values()))):
                return func(*args, **kwargs)
            if func is dropout:
                x, p, train = args
                _, mask = func(torch.ones_like(x, dtype=torch.float32), p, train)
                keep_share = 1.0 - p if train is not False else 1.0
                return (x * mask / keep_share if keep_share else torch.zeros_like(x)), mask
            schema = func._schema
            aliases = [argument.alias_info for argument in schema.arguments]
            written = [i for i, alias in enumerate(aliases) if alias and alias.is_write]
            if len(schema.returns) != 1 or written not in ([], [0]):
                return func(*args, **kwargs)
            drawn = func(
                *map(to_float32, args), **{name: to_float32(value) for name, value in kwargs.items()}
            )
            return args[0].copy_(drawn) if written else drawn.double() if drawn.is_floating_point() else drawn

    return Float32Draws()
