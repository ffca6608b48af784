"""Show a run: toolrl report RUN [RUN ..] [--out report.html | --serve [--port 8900] | --png FOLDER]

RUN is the folder of a run, finished or not. The report is one HTML file that opens without a network: curves, times,
validation, every rollout that fits in, and the tokens of some (docs/report.md). Several runs are compared. With --serve
it is served instead, and follows a run in progress; --png writes the curves as pictures instead. No code that a folder
names is run without --user-code.
Exit code 0: written. 2: a folder is not that of a run, or the port is taken. 130: Ctrl-C has ended the server.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from toolrl.analysis.report.folder import read_runs
from toolrl.analysis.report.page import write_report
from toolrl.analysis.report.png import write_pngs
from toolrl.analysis.report.serve import ReportServer
from toolrl.servers.serving import ServingConfig, add_access_arguments, serving_config
from verl.errors import VerlError
from verl.host.arguments import Arguments
from verl.host.exits import write_error


def arguments() -> Arguments:
    parser = Arguments("toolrl report", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="the file; default: report.html in the folder of the first run")
    parser.add_argument("--serve", action="store_true", help="serve the report, which follows the runs")
    add_access_arguments(parser, port=8900)  # used by --serve
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="write the curves there, a file per family of metrics"
    )
    parser.add_argument("--user-code", action="store_true", help="run the code that the settings of a run name")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    options = parser.read(argv)
    if options.out and (options.serve or options.png):
        parser.error("--serve and --png write no page; leave out --out")
    if options.serve and options.png:
        parser.error("choose --serve or --png")
    out = options.out or options.runs[0] / "report.html"
    try:
        if options.serve:
            return serve(options.runs, serving_config(options), options.user_code)
        if options.png:
            return write_pictures(options.runs, options.png)
        notes = write_report(options.runs, out, options.user_code)
    except VerlError as error:
        return write_error(error)
    sys.stdout.writelines(f"note: {note}\n" for note in notes)
    sys.stdout.write(f"{out} ({out.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def write_pictures(folders: Sequence[Path], out: Path) -> int:
    """Raises ConfigError if a folder is not that of a run, or matplotlib is missing; DataError if it cannot write."""
    runs = read_runs(folders)
    paths = write_pngs(runs, out)
    sys.stdout.writelines(f"note: {note}\n" for run in runs for note in run.notes)
    sys.stdout.writelines(f"{path}\n" for path in paths)
    return 0


def serve(runs: Sequence[Path], config: ServingConfig, user_code: bool) -> int:
    """Serve until Ctrl-C. Raises ConfigError if a folder is not that of a run, or the port is taken."""
    read_runs(runs)
    with ReportServer(runs, config, user_code) as server:
        host = f"[{config.host}]" if ":" in config.host else config.host
        sys.stdout.write(f"http://{host}:{server.port}/  (Ctrl-C ends it)\n")
        if server.has_token:
            sys.stdout.write("a browser asks for a user name and a password: any name, and the token\n")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
