"""`tamis pull`: fetch a model ahead of time."""

from tamis.cli.options import AsJson, Debug, Model, Quiet
from tamis.names import DEFAULT_MODEL


def pull(model: Model = None, as_json: AsJson = False, quiet: Quiet = False, _debug: Debug = False) -> None:
    """Fetch a model, verify it, and print where it lies."""
    from tamis.cli.output import print_json
    from tamis.cli.progress import make_progress
    from tamis.models import pull as fetch

    path = fetch(model, make_progress(quiet=quiet))
    if as_json:
        print_json({"model": model or DEFAULT_MODEL, "path": str(path)})
    else:
        print(path)
