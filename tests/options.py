"""Levers as options of the command line."""

import json


def as_option(choice):
    """Format a choice for the command line: ``NAME=VALUE``, with the value in TOML.

    JSON strings, numbers and booleans are valid TOML.
    """
    value = choice.value
    pairs = (
        (f"{json.dumps(key)} = {json.dumps(item)}" for key, item in value.items())
        if isinstance(value, dict)
        else ()
    )
    text = f"{{{', '.join(pairs)}}}" if isinstance(value, dict) else json.dumps(value)
    return f"{choice.name}={text}"
