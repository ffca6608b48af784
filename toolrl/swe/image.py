"""The repository of a task as its runtimes see it: one folder, made once, read-only, with a git history of one commit.

The original's history, which may hold the fix, stays outside; so do hidden tests that the repository contains.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolrl.sandbox.inside.disk import has_room
from toolrl.swe.runtime import TESTBED, Runtime, RuntimeLostError, checked
from toolrl.swe.tasks import Repository, SweTask
from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.untrusted_files import UNPRIVILEGED_UID
from verl.host.watcher import remove_tree
from verl.units import GIB

GIT_ENVIRONMENT = {  # of our own git: no settings of the user or the system, and one id per content
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
# $0: the interpreter's folder in the repository, $1: the git folder to make, $2: known objects. Ignored files count.
MAKE_BASE = """
command -v git >/dev/null || { echo "the image has no git, which collects the patch" >&2; exit 1; }
export GIT_DIR=$1 GIT_WORK_TREE=$PWD GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent
git init -q && { [ -z "$2" ] || echo "$2" >"$1/objects/info/alternates"; } &&
  git -c core.autocrlf=false add -A -f -- . ${0:+":(exclude)$0"} &&
  git -c user.name=base -c user.email=base@localhost -c gc.auto=0 commit -q --allow-empty -m base || exit 1
"""
# The image's history may hold the fix. The nearest tag stays, as versions are derived from it.
REMOVE_HISTORY = """
tag=$(git -c 'safe.directory=*' describe --tags --abbrev=0 2>/dev/null)
find . -name .git -prune -exec rm -rf {} + || exit 1
"""
NEW_HISTORY = """
[ -z "$0" ] || echo "/$0" >>"$1/info/exclude"
cp -r "$1" .git && git config --file .git/config --unset core.worktree || exit 1
[ -z "$tag" ] || GIT_DIR=.git git tag -- "$tag"
"""


LEFT_OUT = ("__pycache__", ".pytest_cache", ".git")  # of a folder


class ImageStore:
    """Images by their digest: beyond a limit those that were used least recently and have no user are removed.

    trash: a folder on the same disk, which is removed also after a kill
    """

    def __init__(self, folder: Path, trash: Path, limit_gib: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._trash, self._limit = folder, trash, limit_gib * GIB
        self._users: Counter[str] = Counter()
        known = sorted(folder.glob("[!.]*"), key=lambda each: each.stat().st_mtime)
        self._sizes = {each.name: _size(each) for each in known}  # by last use

    @contextmanager
    def used(self, digest: str) -> Iterator[None]:
        self._sizes[digest] = self._sizes.pop(digest, 0)
        self._users[digest] += 1
        try:
            yield
        finally:
            self._users[digest] -= 1

    async def make_room(self, digest: str) -> None:
        """For a new image, which is there."""
        self._sizes[digest] = await asyncio.to_thread(_size, self.folder / digest)
        for other in list(self._sizes):
            if sum(self._sizes.values()) <= self._limit:
                return
            if other != digest and other in self._sizes and not self._users[other]:  # else removed meanwhile
                del self._sizes[other], self._users[other]
                removed = (self.folder / other).rename(self._trash / f"removed-{other}")
                await asyncio.to_thread(remove_tree, removed)


def prepare_image(task: SweTask, store: Path) -> Path:
    """The folder of a task's repository, made if it does not exist. Raises DataError, RuntimeLostError on a full disk.

    Folders are named by what they are made of; a git revision or a tar file does not change, a folder is read anew by
    every process.
    """
    store.mkdir(parents=True, exist_ok=True)
    with (
        _lost_on_full_disk(store),
        tempfile.TemporaryDirectory(dir=store, prefix=".unfinished-") as unfinished,
        _lost_on_full_disk(store),  # before the removal of the folder makes room
    ):
        tree = Path(unfinished) / "tree"
        target = store / _make_image(tree, task)
        if not target.exists():
            try:
                tree.rename(target)
            except OSError:
                if not target.exists():  # else made by another process meanwhile
                    raise
    return target


@contextmanager
def _lost_on_full_disk(store: Path) -> Iterator[None]:
    """Raises RuntimeLostError for what fails while the disk is full."""
    try:
        yield
    except (DataError, OSError) as error:
        if has_room(store):
            raise
        raise RuntimeLostError(f"the disk of {store} is full ({error})") from error


def _make_image(tree: Path, task: SweTask) -> str:
    """Returns its digest."""
    assert task.repository is not None
    tree.mkdir(mode=0o755)
    _fill(tree, task.repository)
    _remove_histories(tree)
    _run(["git", "init", "-q", "-b", "main"], tree, "repository")
    if task.bug_patch:
        _run(["git", "apply", "-"], tree, "bug_patch", task.bug_patch)
    _remove_hidden(tree, task)
    _run(["git", "add", "-A", "-f"], tree, "repository")
    _run(["git", "-c", "gc.auto=0", "commit", "-q", "--allow-empty", "-m", "base"], tree, "repository")
    _check_size(tree, task)
    untrusted_files.give(tree, UNPRIVILEGED_UID)  # untrusted code must be able to change its own copy
    return _run(["git", "-c", "safe.directory=*", "rev-parse", "HEAD"], tree, "repository").strip()


def _check_size(tree: Path, task: SweTask) -> None:
    """Of a folder that is collected whole, its history included. Raises DataError if no patch could be collected."""
    if task.harbor is None:
        return
    size_mib = int(_run(["du", "-sk", "."], tree, "harbor").split()[0]) / 1024
    if size_mib > task.limits.file_mib:
        problem = f"the files of {task.id} and their history take {size_mib:.1f} MiB"
        hint = "Raise environment.storage_mb in its task.toml"
        raise DataError(problem, f"at most {task.limits.file_mib} MiB", hint, field="harbor")


def image_key(task: SweTask) -> str:
    """Equal for tasks whose images are equal, if folders have not changed."""
    source = task.repository and (task.repository.path, task.repository.revision)
    parts = [source, task.bug_patch, sorted(task.hidden_tests.items()), task.withheld]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


async def make_base(
    runtime: Runtime, task: SweTask, git_dir: str, *, objects: str = "", hide_history: bool = False
) -> None:
    """Make a commit of all that the agent starts from, the base of its patch. Raises CommandFailedError.

    objects: folder of objects that need not be stored again
    hide_history: replace the work tree's own history by this commit
    """
    script = f"{REMOVE_HISTORY}{MAKE_BASE}{NEW_HISTORY}" if hide_history else MAKE_BASE
    argv = ["/bin/sh", "-c", script, task.own_interpreter, git_dir, objects]
    await checked(runtime, argv, cwd=task.workdir or TESTBED)


def _fill(tree: Path, repository: Repository) -> None:
    source = Path(repository.path)
    if repository.revision:
        _check_out(tree, source, repository.revision)
        return
    try:
        if source.is_dir():
            untrusted_files.copy_tree(source, tree, followed=False, without=LEFT_OUT)
        else:
            with untrusted_files.opened(source.parent, source.name, shared=True) as archive:
                tree.rmdir()
                untrusted_files.unpack(archive, tree)
    except (DataError, OSError) as error:
        problem = f"{source} cannot be read: {error}"
        raise DataError(
            problem, "a folder, a tar file, or a git repository and a revision", field="repository"
        ) from error


def _check_out(tree: Path, source: Path, revision: str) -> None:
    """The files of a commit below the folder; `git archive` would leave out those with the attribute export-ignore."""
    git = ["git", "-C", str(source), "-c", "safe.directory=*", "rev-parse"]
    try:
        commit = _run([*git, "--verify", "--end-of-options", f"{revision}^{{commit}}"], tree, "repository")
    except DataError as error:
        problem = f"{source} at {revision}: {error.problem}"
        raise DataError(problem, "a git repository with this revision", field="repository") from error
    folder = _run([*git, "--absolute-git-dir"], tree, "repository").strip()
    prefix = _run([*git, "--show-prefix"], tree, "repository").strip()
    git = ["git", f"--git-dir={folder}", f"--work-tree={tree}", "-c", "core.autocrlf=false", "-c", "core.eol=lf"]
    index = {"GIT_INDEX_FILE": str(tree.with_name("index"))}
    _run([*git, "read-tree", f"{commit.strip()}:{prefix}"], tree, "repository", **index)
    _run([*git, "checkout-index", "--all"], tree, "repository", **index)


def _remove_histories(tree: Path) -> None:
    """Its own, and those of repositories in it, whose files would be no part of a patch."""
    for folder, folders, files in os.walk(tree):
        path = Path(folder, ".git")
        if path.is_symlink() or ".git" in files:
            path.unlink()
        elif ".git" in folders:
            folders.remove(".git")
            remove_tree(path)


def _size(folder: Path) -> int:
    """Bytes on disk."""
    return sum(Path(each, name).lstat().st_blocks << 9 for each, _, files in os.walk(folder) for name in files)


def _remove_hidden(tree: Path, task: SweTask) -> None:
    """What is withheld, and hidden tests that the repository has; older versions of them stay."""
    for name in task.withheld:
        untrusted_files.remove(tree, name)
    for name, text in task.hidden_tests.items():
        with suppress(FileNotFoundError, DataError):  # no file, or larger
            if untrusted_files.read(tree, name, len(text.encode()), shared=True) == text.encode():
                untrusted_files.remove(tree, name)


def _run(command: list[str], folder: Path, field: str, stdin: str = "", **variables: str) -> str:
    environment = GIT_ENVIRONMENT | variables
    done = subprocess.run(command, cwd=folder, input=stdin.encode(), capture_output=True, env=environment)
    if done.returncode:
        raise DataError(f"git: {done.stderr.decode(errors='replace').strip()}", field=field)
    return done.stdout.decode()
