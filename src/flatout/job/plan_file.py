"""Reads a Plan from its file."""

from pathlib import Path

from flatout.job.folder import read_text
from flatout.schema.errors import PlanError
from flatout.schema.plan import MAX_PLAN_BYTES, Plan


def read_plan(path: Path) -> Plan:
    """Return the Plan of a file. Raises PlanError if the file is missing or invalid."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may have no end
            raise PlanError(f"{path} is not a file. To create a plan, run `flatout tune COMMAND...`.")
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise PlanError(
                f"{path} has {path.stat().st_size:,} bytes; a plan is never that large. Is it the right file?"
            )
        return Plan.from_toml(read_text(path, MAX_PLAN_BYTES), str(path))
    except FileNotFoundError:
        raise PlanError(
            f"there is no plan {str(path)!r}. To create one, run `flatout tune COMMAND...`."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read as a plan: {error}.") from None
