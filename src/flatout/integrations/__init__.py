"""flatout inside other programs: a pytest plugin, and the notebook's `%%flatout`.

pytest and IPython load it into their own process, so it must load fast. All work is done by the `flatout`
command, which it starts.

Runs in: a script that imports flatout: pytest, IPython or Jupyter.
Imports: schema; pytest.
Start with: pytest_plugin.py, notebook.py.
"""
