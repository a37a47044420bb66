"""The table of all rules, in the order of their codes. To add a rule, add one file.

FL0xx rules report wrong results, FL1xx wasted time, FL2xx wasted memory and FL3xx fragile code.
In each range, codes from xx50 on need a profile of the running program.
"""

from importlib import import_module
from pkgutil import iter_modules

from flatout.diagnose import invariants
from flatout.diagnose.rule import Rule

TABLE: tuple[Rule, ...] = tuple(
    sorted(
        (
            import_module(f"{package}.{module.name}").RULE
            for package, path in ((__name__, __path__), (invariants.__name__, invariants.__path__))
            for module in iter_modules(path)
        ),
        key=lambda rule: str(rule.code),
    )
)
