"""A process that has already imported torch and becomes programs. For each request, a line of JSON, it forks,
and the child runs the program or the command line that becomes it. In the child `import torch` takes no
time, but happens when the program asks, as in its own process. Answers with exit codes.

Addresses and the files read by the machine's libraries are those of the parent; a program that depends on
them requires its own process.
"""

import json
import os
import sys
import time
import types
from importlib.machinery import ModuleSpec

import numpy  # noqa: F401
import torch
import torch._dynamo
import torch._subclasses.fake_tensor
import torch.utils.data


class Here:
    """Finds torch in its installed place."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return (
            ModuleSpec(name, Here, is_package=True)
            if name == "torch" and "torch" not in sys.modules
            else None
        )

    @staticmethod
    def create_module(spec, torch=torch):
        spec.submodule_search_locations = torch.__path__
        return torch

    @staticmethod
    def exec_module(module):
        pass


class Becomes(BaseException):
    pass


def become(file, argv, environment):
    raise Becomes(argv, environment)


def code_of(number, limit_s):
    """The exit code of a child; a child that does not end is killed."""
    end = time.monotonic() + limit_s
    while True:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(number, 9)
        time.sleep(0.005)


while True:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    asked = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(code_of(child, asked["limit_s"]), flush=True)

for number, name in (1, "out"), (2, "err"):
    os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.setpgid(0, 0)
os.chdir(asked["cwd"])
os.environ.clear()
os.environ.update(asked["env"])
sys.argv = asked["argv"]
if sys.argv[0] == "flatout":
    really, os.execvpe = os.execvpe, become
    try:
        from flatout.cli.main import main

        main()
    except Becomes as found:
        sys.argv, environment = found.args[0][1:], found.args[1]
        os.environ.clear()
        os.environ.update(environment)
    os.execvpe = really
else:
    del sys.argv[0]
sys.orig_argv = [sys.executable, *sys.argv]  # the program that it would become again
sys.path[:1] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
del sys.modules["torch"]
sys.meta_path.insert(0, Here)
sys.modules.pop("sitecustomize", None)
if os.environ.get("PYTHONPATH"):
    __import__("sitecustomize")
sys.modules["__main__"] = sys.modules["__mp_main__"] = module = types.ModuleType("__main__")
module.__file__ = os.path.abspath(sys.argv[0])
with open(module.__file__) as file:
    text = file.read()
exec(compile(text, module.__file__, "exec"), vars(module))
