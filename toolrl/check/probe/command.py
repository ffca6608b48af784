"""Would training learn? toolrl probe data.train_files=[FILE] model.path=M

    recipe=NAME   environment, tool-call format, reward, lengths and rollout.n of a training recipe
    --help        print this text and every key with its default
    --config FILE settings of a YAML file, such as a run's config.yaml
    --user-code   run the code that this file names; it may be another author's
    --cfg job     print the resulting configuration and exit

Rolls out `eval.limit` rows `rollout.n` times each as training would, and reports format, rewards, zero-advantage
groups, the cost of a group with nonzero advantages, and advice. The same command resumes where it was stopped
(docs/evaluation.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from toolrl.commands import PROBE
from verl.errors import ConfigError
from verl.trainer.cli import CliArgs, check_files, check_model, check_names, run_cli


def main(argv: Sequence[str]) -> int:
    return run_cli(argv, __doc__ or "", PROBE, run)


def run(args: CliArgs, console: Console) -> dict[str, Any]:
    """The statistics and the advice."""
    config = args.config
    check_model(config.model)
    files = config.data.train_files
    check_files("data.train_files", files, needed=True)
    if len(files) > 1:
        raise ConfigError(f"data.train_files: a probe reads one file, got {len(files)}")
    check_names(config)
    from toolrl.check.probe.run import probe  # slow imports: after the cheap checks
    from verl.host.daemon import run_async

    return run_async(probe(config, console))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
