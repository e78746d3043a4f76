"""Outputs on the hub: made in a scratch folder, and added to a repository in one commit.

The folder is a whole output with its journal, as one on this machine would be, until the hub has
the commit. Weights are uploaded first, which nobody sees; the hub keeps them, so that an upload
that broke off sends only the files that the hub lacks. Then one commit adds all files and removes
those of an output that it replaces. The commit before it must still be the one that was checked.

The repository is made before the merge begins, private unless it exists, so that a lack of rights
is noticed then. Token, endpoint and retries are those of `huggingface_hub`; nothing that it says is
repeated with a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dare.documents.words import show_size
from dare.errors import DareError, ExistsError, OutputError, install_command, needed
from dare.inputs.hub import LOG_IN, guarded
from dare.output.output import Output
from dare.output.sink import FileSink, make_sink
from dare.output.store import StorePublisher, noted, written_names
from dare.output.targets import MANIFEST_NAME, MAX_MANIFEST_BYTES, write_synced
from dare.planning.data import Layout
from dare.stores.locations import parse_address, without_credentials
from dare.tensors.chunks import bytes_digest
from dare.tensors.files import read_limited

if TYPE_CHECKING:
    from huggingface_hub import HfApi

HUBS_OWN = ".gitattributes"  # the file that the hub puts into a new repository


class HubPublisher(StorePublisher):
    """Publishes an output in a repository on the hub, from the scratch folder."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        name = parse_address(str(layout.target))
        self._repo, self._branch = name.repo, name.revision or "main"

    def check(self, inputs: Iterable[Path], *, overwrite: bool) -> None:  # noqa: ARG002
        """Refuse a repository with files; inputs are safe, as the hub keeps all commits."""
        noted(self.layout)  # refuses a folder that another process has
        with self._asking() as api:
            self._replaceable(api, overwrite=overwrite)

    def read_manifest(self) -> bytes:
        with self._asking() as api:
            return self._read_manifest(api, *self._list(api))

    def make_sink(self, metadata: Mapping[str, str]) -> FileSink:
        """Return a sink in the scratch folder, after making the repository and the branch."""
        with self._asking() as api:
            api.create_repo(self._repo, private=True, exist_ok=True)
            if self._branch not in (ref.name for ref in api.list_repo_refs(self._repo).branches):
                first = api.list_repo_commits(self._repo)[-1].commit_id  # without main's files
                api.create_branch(self._repo, branch=self._branch, revision=first)
            api.auth_check(self._repo, write=True)
        return make_sink(self.folder, self.layout, metadata)

    def publish(self, output: Output, manifest: bytes) -> list[str]:
        """Upload the weights, add all files in one commit, and remove the folder."""
        assert output.journal is not None
        write_synced(self.folder / MANIFEST_NAME, manifest)
        output.journal.note_synced(finished=bytes_digest(manifest))
        output.sink.close()
        with self._asking() as api:
            from huggingface_hub import CommitOperationAdd, CommitOperationDelete

            place: dict[str, Any] = {"repo_id": self._repo, "revision": self._branch}
            head, old = self._replaceable(api, overwrite=output.overwrite)
            names = [*self.layout.files, *output.others, MANIFEST_NAME]
            adds = [CommitOperationAdd(name, self.folder / name) for name in names]
            for add in adds[: len(self.layout.files)]:
                size = show_size(add.upload_info.size)
                output.sink.announce(f"uploading {add.path_in_repo} ({size})")
                api.preupload_lfs_files(additions=[add], **place)
            made = api.create_commit(
                operations=[*adds, *map(CommitOperationDelete, sorted({*old} - {*names}))],
                commit_message="Merge models with dare",
                parent_commit=head,
                **place,
            )
        output.commit = made.oid
        output.sink.announce(f"{self.layout.target} is commit {made.oid}")
        output.journal.release()
        return self.remove_folder()

    # ------------------------------------------------------------ what the hub has

    def _list(self, api: HfApi) -> tuple[str | None, list[str]]:
        """Return the branch's last commit and its files; None if there is no such branch."""
        from huggingface_hub import errors

        try:
            facts = api.model_info(self._repo, revision=self._branch)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            return None, []
        return facts.sha, [file.rfilename for file in facts.siblings or ()]

    def _replaceable(self, api: HfApi, *, overwrite: bool) -> tuple[str | None, list[str]]:
        """Return the branch's commit, and its files if they may be replaced."""
        commit, names = self._list(api)
        names = [name for name in names if name != HUBS_OWN]
        if names and not overwrite:
            raise ExistsError(self.layout.target)
        ours = written_names(self._read_manifest(api, commit, names), MANIFEST_NAME)
        if foreign := [name for name in names if name not in ours]:
            raise OutputError(
                f"{self.layout.target}: contains {foreign[0]}, which was not made by dare, so it "
                "is not replaced; remove it on the hub, or choose another name or branch"
            )
        return commit, names

    def _read_manifest(self, api: HfApi, commit: str | None, names: Iterable[str]) -> bytes:
        """Return the manifest of a commit with these files; nothing if it has none."""
        if MANIFEST_NAME not in names:
            return b""
        with TemporaryDirectory() as folder:
            api.hf_hub_download(self._repo, MANIFEST_NAME, revision=commit, local_dir=folder)
            return read_limited(Path(folder, MANIFEST_NAME), MAX_MANIFEST_BYTES)

    # ------------------------------------------------------------ errors

    @contextmanager
    def _asking(self) -> Iterator[HfApi]:
        """Give the client, without bars; errors have a remedy and no secrets."""
        target = self.layout.target
        needs = f"writing to the hub needs huggingface_hub: {install_command('hf')}"
        with needed(OutputError(f"{target}: {needs}")):
            from huggingface_hub import HfApi, get_token, utils
        bars: Any = utils  # its public functions, which it does not declare as such
        was_without, token = bars.are_progress_bars_disabled(), None
        try:
            with warnings.catch_warnings(), guarded():
                warnings.simplefilter("ignore")  # what the client has to say of cards and bars
                bars.disable_progress_bars()
                if (token := get_token()) is None:
                    raise OutputError(f"writing to the hub needs a token; {LOG_IN}")
                yield HfApi()
        except ExistsError:
            raise
        except DareError as error:
            raise OutputError(f"{target}: {str(error).removeprefix(f'{target}: ')}") from None
        except Exception as error:
            text = without_credentials(f"{target}: {_explain(error)}")
            raise OutputError(text.replace(token or "\0", "…")) from None
        finally:
            if not was_without:
                bars.enable_progress_bars()


def _explain(error: BaseException) -> str:
    """Say what is wrong and what to do, in our words."""
    from huggingface_hub import errors

    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__  # the reason why a file was not uploaded
    again = "run the same merge again; it resumes"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "is on the hub; turn offline mode off (HF_HUB_OFFLINE), or choose a path"
    if not isinstance(error, errors.HfHubHTTPError):
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"could not be sent to the hub: {reason}; when that is mended, {again}"
    status = error.response.status_code
    if status in (401, 403, 404):
        return f"the hub denies access ({status}); {LOG_IN}, with a token that may write there"
    if status in (409, 412):
        return f"the repository changed meanwhile ({status}); {again}"
    if status == 429:
        return f"the hub got too many requests (429); wait a few minutes, then {again}"
    if status < 500:
        said = " ".join((error.server_message or "no reason given").split())
        return f"the hub refuses it ({status}): {said:.200}; when that is mended, {again}"
    return f"the hub failed ({status}); {again} later"
