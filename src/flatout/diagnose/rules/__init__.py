"""The table of all rules, in the order of their codes. To add a rule, add one file.

FL0xx rules report wrong results, FL1xx wasted time, FL2xx wasted memory and FL3xx fragile code.
In each range, codes from xx50 on need a profile of the running program.
"""

from importlib import import_module
from pkgutil import iter_modules

from flatout.diagnose.rule import Rule

TABLE: tuple[Rule, ...] = tuple(
    sorted(
        (import_module(f"{__name__}.{module.name}").RULE for module in iter_modules(__path__)),
        key=lambda rule: str(rule.code),
    )
)
