"""Upload a trained model to the hub: toolrl push RUN OWNER/NAME [--private] [--adapter]

The folder is that of `toolrl export --format hf`, or with --adapter that of `--format adapter`. The token is $HF_TOKEN,
or that of `hf auth login`; $HF_ENDPOINT names another hub.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from toolrl.serve.export.folder import add_base_argument, check_base, copy_model
from toolrl.serve.openai_server.served_model import add_format_arguments
from verl.errors import ConfigError, VerlError
from verl.host.arguments import Arguments
from verl.host.exits import write_error
from verl.host.files import unwritable
from verl.lora import base_of
from verl.text import in_short

_REACH_TIMEOUT_S = 10.0


def arguments() -> Arguments:
    parser = Arguments("toolrl push", __doc__)
    add_format_arguments(parser)
    parser.add_argument("repository", metavar="OWNER/NAME")
    parser.add_argument("--private", action="store_true", help="if the repository is created")
    parser.add_argument("--revision", help="branch, created if missing (default: main)")
    parser.add_argument("--adapter", action="store_true", help="alone, of a run with lora.rank")
    add_base_argument(parser)
    parser.add_argument("--results", type=Path, action="append", default=[], metavar="FILE", help="table for the card")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().read(argv)
    try:
        check_base(options, options.adapter)
        with tempfile.TemporaryDirectory(prefix="toolrl-push-") as folder:
            copy_model(options, Path(folder), options.adapter)
            if options.adapter:
                _check_base(base_of(folder))
            url = upload(Path(folder), options.repository, options.private, options.revision)
    except VerlError as error:
        return write_error(error)
    except OSError as error:  # raised by the temporary folder
        return write_error(unwritable(Path(tempfile.gettempdir()), error))
    sys.stdout.write(f"{url}\n")
    return 0


def _check_base(base: str) -> None:
    """Raises ConfigError for a folder of this machine, which an upload would name."""
    if Path(base).is_absolute() or Path(base).exists():
        hint = "name it on the hub: --base OWNER/NAME. That of lora.base_dtype=nf4 is another model than your own: "
        raise ConfigError(f"the adapter's base is the folder {base}; {hint}upload it first, by toolrl push FOLDER ..")


def upload(folder: Path, repository: str, private: bool, revision: str | None) -> str:
    """One commit with the folder's files; its address. Raises ConfigError if the hub refuses or does not answer."""
    from huggingface_hub import HfApi, get_session

    api = HfApi()
    try:
        get_session().head(api.endpoint, timeout=_REACH_TIMEOUT_S)  # the client's own requests wait much longer
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=folder, revision=revision, commit_message="Upload by toolrl push"
        )
    except Exception as error:  # huggingface_hub's, its HTTP client's and its transfer library's have no common base
        raise ConfigError(
            f"{repository} was not uploaded to {api.endpoint} ({in_short(error)}); check the name, $HF_TOKEN and its "
            "right to write"
        ) from error
    return str(done.commit_url)


if __name__ == "__main__":
    sys.exit(main())
