"""The rules, one a file, in the order of their codes. Adding one is one file and one line here.

FL0xx make a wrong result, FL1xx waste time, FL2xx waste memory, FL3xx are fragile; from xx50 on stand those that only running tells.
"""

from flatout.diagnose.rule import Rule

TABLE: tuple[Rule, ...] = ()
