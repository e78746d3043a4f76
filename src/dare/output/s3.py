"""Outputs in S3, and in stores that speak its language, by boto3.

Credentials, region and endpoint come from where boto3 looks for them: the environment, profiles,
the machine's role. Nothing of them is ever in a message: of what a store says, only its short code
is passed on.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from dare.errors import OutputError
from dare.output.objects import GOES_ON, MARK, Sent, Upload
from dare.planning.parts import UPLOADS
from dare.stores.reading import INSTALL, aws_session

TRIES = 6
"""Of each call, with back-off of up to 20 s in between."""
CONNECT_SECONDS = 10
ANSWER_SECONDS = 30
KEYS_AT_ONCE = 1000

_ABSENT = {"404", "NoSuchKey", "NotFound"}
_TAKEN = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
_UNKNOWN = {"501", "NotImplemented"}
_GONE = {"404", "NoSuchUpload"}
_REASONS = (
    ({"NoSuchBucket"}, "there is no such bucket; make it first"),
    (
        {"403", "AccessDenied", "AllAccessDisabled", "AccountProblem"},
        "access is denied; the credentials must be allowed to list, read, write and delete there",
    ),
    (
        {"401", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity"},
        "the store does not accept the credentials; set them in the environment or in a profile",
    ),
    (
        {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"},
        f"the credentials have expired; renew them, then {GOES_ON}",
    ),
    (
        {"InvalidToken", "400"},
        f"the store does not accept the credentials or the request; renew them, then {GOES_ON}",
    ),
    (
        {"301", "307", "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"}
        | {"IllegalLocationConstraintException"},
        "the bucket is in another region; set AWS_REGION to it",
    ),
    (
        {"507", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "413"},
        f"the store is full or the quota is used up; make room, then {GOES_ON}",
    ),
    ({"RequestTimeTooSkewed"}, "the clock of this machine is wrong; set it"),
)


_opened: dict[Any, S3Objects] = {}


def open_bucket(bucket: str) -> S3Objects:
    """The objects of a bucket; a client is made once, since boto3 takes its time for it."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    key = os.getpid(), bucket, frozenset(settings.items())
    if key not in _opened:
        _opened[key] = S3Objects(bucket)
    return _opened[key]


class S3Objects:
    """The objects of a bucket in S3."""

    def __init__(self, bucket: str) -> None:
        session = aws_session()
        if session is None:
            raise OutputError(f"s3://{bucket}: writing to S3 needs boto3: {INSTALL}")
        from botocore.config import Config

        self._bucket = bucket
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=ANSWER_SECONDS,
            retries={"mode": "standard", "total_max_attempts": TRIES},
            max_pool_connections=4 * UPLOADS,
            # Content-MD5 is sent with every part, which every store knows how to check.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        region = os.environ.get("AWS_REGION") or None  # of which boto3 knows nothing
        with self._explaining(""):
            self._client = session.client("s3", region_name=region, config=config)

    def describe(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    # ------------------------------------------------------------ objects

    def get(self, key: str) -> bytes | None:
        from botocore.exceptions import BotoCoreError

        for left in reversed(range(TRIES)):
            with self._explaining(key):
                answer = self._ask("get_object", *_ABSENT, Key=key)
                try:  # bodies are not read again by boto3 if they break off
                    return None if answer is None else bytes(answer["Body"].read())
                except BotoCoreError:
                    if not left:
                        raise
        raise AssertionError

    def put(self, key: str, content: bytes) -> None:
        with self._explaining(key):
            self._ask("put_object", Key=key, Body=content, ContentMD5=_md5(content))

    def put_new(self, key: str, content: bytes) -> bool:
        given = {"Key": key, "Body": content, "ContentMD5": _md5(content)}
        with self._explaining(key):
            if self._ask("put_object", *_TAKEN, *_UNKNOWN, IfNoneMatch="*", **given):
                return True
        found = self.get(key)
        if found is None:  # a store without conditions, or one that was taken away again
            self.put(key, content)
        return found in (None, content)  # our own, if an answer was lost

    def mark_of(self, key: str) -> str | None:
        with self._explaining(key):
            answer = self._ask("head_object", *_ABSENT, Key=key)
        return None if answer is None else str(answer.get("Metadata", {}).get(MARK, ""))

    def age(self, key: str) -> float | None:
        with self._explaining(key):
            answer = self._ask("head_object", *_ABSENT, Key=key)
        if answer is None:
            return None
        # By the clock of the store alone: ours may be wrong.
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return float((now - answer["LastModified"]).total_seconds())

    def list(self, folder: str) -> list[str]:
        with self._explaining(folder):
            pages = self._client.get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=self._bucket, Prefix=f"{folder}/")
            return [entry["Key"] for page in found for entry in page.get("Contents", ())]

    def delete(self, keys: Iterable[str]) -> None:
        rest = list(keys)
        while rest:
            some, rest = rest[:KEYS_AT_ONCE], rest[KEYS_AT_ONCE:]
            named = {"Objects": [{"Key": key} for key in some], "Quiet": True}
            with self._explaining(some[0]):
                answer = self._ask("delete_objects", Delete=named)
            for refused in (answer or {}).get("Errors", ()):
                if refused.get("Code") not in _ABSENT:
                    raise OutputError(self._told(refused["Key"], str(refused.get("Code"))))

    # ------------------------------------------------------------ parts

    def begin(self, key: str, mark: str) -> Upload:
        with self._explaining(key):
            answer = self._ask("create_multipart_upload", Key=key, Metadata={MARK: mark})
        assert answer is not None
        return Upload(key, answer["UploadId"], mark)

    def send(self, upload: Upload, number: int, content: bytes) -> str:
        with self._explaining(upload.key):
            answer = self._ask(
                "upload_part",
                **_named(upload),
                PartNumber=number,
                Body=content,
                ContentMD5=_md5(content),
            )
        assert answer is not None
        return str(answer["ETag"])

    def sent(self, upload: Upload) -> dict[int, Sent] | None:
        found: dict[int, Sent] = {}
        after = 0
        while True:
            with self._explaining(upload.key):
                given = {**_named(upload), "PartNumberMarker": after}
                answer = self._ask("list_parts", *_GONE, **given)
            if answer is None:
                return None
            for part in answer.get("Parts", ()):
                found[part["PartNumber"]] = Sent(part["ETag"], part["Size"])
            if not answer.get("IsTruncated") or max(found, default=0) <= after:
                return found
            after = max(found)

    def complete(self, upload: Upload, parts: Mapping[int, str], *, new: bool) -> bool:
        named = [{"PartNumber": n, "ETag": etag} for n, etag in sorted(parts.items())]
        given = {**_named(upload), "MultipartUpload": {"Parts": named}}
        expected = (*_GONE, *_TAKEN, *_UNKNOWN)
        condition = {"IfNoneMatch": "*"} if new else {}
        with self._explaining(upload.key):
            done = self._ask("complete_multipart_upload", *expected, **condition, **given)
            if done is None and (found := self.mark_of(upload.key)) != upload.mark:
                if new and found is not None:
                    return False
                # A store without conditions; or the upload is gone, which this one says.
                self._ask("complete_multipart_upload", **given)
        return True

    def abort(self, upload: Upload) -> None:
        with self._explaining(upload.key):
            self._ask("abort_multipart_upload", *_GONE, **_named(upload))

    # ------------------------------------------------------------ asking

    def _ask(self, call: str, *expected: str, **given: Any) -> dict[str, Any] | None:
        """Call the store; None if its answer is an error that is expected."""
        from botocore.exceptions import ClientError

        try:
            answer: dict[str, Any] = getattr(self._client, call)(Bucket=self._bucket, **given)
        except ClientError as error:
            if _code(error) in expected and _code(error) != "NoSuchBucket":
                return None
            raise
        return answer

    @contextmanager
    def _explaining(self, key: str) -> Iterator[None]:
        """Say what a store or the way to it refuses."""
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            NoCredentialsError,
            NoRegionError,
            PartialCredentialsError,
            TokenRetrievalError,
        )

        try:
            yield
        except ClientError as error:
            raise OutputError(self._told(key, _code(error))) from None
        except (NoCredentialsError, PartialCredentialsError, TokenRetrievalError):
            raise OutputError(
                f"{self.describe(key)}: no credentials were found for it; set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            ) from None
        except RecursionError:  # boto3 asks where a bucket lies, and is sent away for that too
            raise OutputError(self._told(key, "PermanentRedirect")) from None
        except NoRegionError:
            raise OutputError(f"{self.describe(key)}: set AWS_REGION to its region") from None
        except BotoCoreError as error:
            if isinstance(error.kwargs.get("error"), RecursionError):  # which HTTPClientError wraps
                raise OutputError(self._told(key, "PermanentRedirect")) from None
            raise OutputError(
                f"{self.describe(key)}: the store does not answer "
                f"({type(error).__name__}, {TRIES} tries); when it answers again, "
                f"{GOES_ON}"
            ) from None

    def _told(self, key: str, code: str) -> str:
        """What a code means for the user."""
        remedy = next((text for codes, text in _REASONS if code in codes), None)
        if remedy is None:
            remedy = f"the store still refuses after {TRIES} tries; later, {GOES_ON}"
        return f"{self.describe(key)}: {remedy} ({code})"


def _named(upload: Upload) -> dict[str, str]:
    return {"Key": upload.key, "UploadId": upload.id}


def _md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code") or "unknown")
