"""Objects of one bucket under one prefix, by the S3 protocol. Every call but signing blocks.

Endpoint, region and keys come from where every S3 program looks for them: the variables
``AWS_ENDPOINT_URL_S3``, ``AWS_DEFAULT_REGION``, ``AWS_ACCESS_KEY_ID`` and
``AWS_SECRET_ACCESS_KEY``, or the file that ``AWS_SHARED_CREDENTIALS_FILE`` names.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import boto3
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.line_limits import transfer_timeout_s
from hypergpu.part_file import Span
from hypergpu.units import Milliseconds

_ADDRESS = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[^?#]*))?")
_EXPIRY_S = 16 * 60
"""Stores refuse everything when clocks are 15 minutes apart; until then an address must hold."""
_STEP_BYTES = 256 << 10
_TIMEOUT_MS = Milliseconds(10_000)
_MISSING = frozenset({"NoSuchKey", "404"})
_FORBIDDEN = frozenset(
    {
        "AccessDenied",
        "Forbidden",
        "InvalidAccessKeyId",
        "NoCredentialsError",
        "NoSuchBucket",
        "PartialCredentialsError",
        "SignatureDoesNotMatch",
        "Unauthorized",
    }
)
_EMPTY = "InvalidRange"
"""Answer of an object without bytes where some are asked for."""
_UPLOADING = TransferConfig(
    multipart_threshold=64 << 20, multipart_chunksize=16 << 20, max_concurrency=4
)
_CLIENT = Config(
    signature_version="s3v4",
    connect_timeout=3,
    read_timeout=8,
    retries={"total_max_attempts": 2, "mode": "standard"},
    max_pool_connections=32,
    # Not every store knows the newer checksums, and digests are compared anyway.
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
)


class BucketError(HyperGPUError):
    """The store refused something, or did not answer."""

    def __init__(self, detail: str, code: str = "") -> None:
        super().__init__(Reason.STORE_UNREACHABLE, detail)
        self.code = code
        """Name of the error by the store or by boto3."""

    @property
    def is_forbidden(self) -> bool:
        """Whether keys, bucket or permissions are wrong, which does not pass by itself."""
        return self.code in _FORBIDDEN


class StoredObject(NamedTuple):
    """An object, or an upload in parts that has not ended."""

    key: str
    since_s: float
    """When it was written or begun, in Unix time of the store."""
    size_bytes: int = 0
    """0 for an upload in parts."""
    upload_id: str = ""
    """Names an upload in parts; empty for objects."""


class S3Bucket:
    """The part of a bucket that belongs to one coordinator. Threads may share it."""

    def __init__(self, address: str, folder: str, **told: str) -> None:
        """Name it; nothing is asked yet.

        Args:
            address: ``s3://BUCKET/PREFIX``.
            folder: Below the prefix; every key is in it.
            told: What takes the place of the environment, by boto3's names.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, the address or what the environment says is none.
        """
        match = _ADDRESS.fullmatch(address)
        if match is None:
            detail = f"blobs: {address!r} is not of the form s3://BUCKET/PREFIX"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)
        self._bucket = match["bucket"]
        parts = [*(match["prefix"] or "").split("/"), folder]
        self._prefix = "".join(f"{part}/" for part in parts if part)
        self._is_over = threading.Event()
        try:
            self._client: Any = _client(told)
        except (BotoCoreError, ValueError) as wrong:
            raise HyperGPUError(Reason.ARGUMENT_INVALID, f"blobs: {wrong}") from wrong

    def check(self) -> None:
        """Write, read and delete one object.

        Raises:
            BucketError: With what the store says.
        """
        key, content = "check", b"HyperGPU"
        with self._explain("a test object"):
            self._client.put_object(**self._object(key), Body=content)
            read = self._client.get_object(**self._object(key))["Body"].read()
            self._client.delete_object(**self._object(key))
        if read != content:
            raise BucketError("what was written to the object store is not what it gives back")

    def probe(self) -> None:
        """Ask for an object, there or not.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        self.size("probe")

    def read_address(self, key: str) -> str:
        """An address at which everybody may read an object for a while."""
        return self._sign("get_object", self._object(key))

    def write_address(self, key: str, size_bytes: int) -> str:
        """An address at which everybody may write an object of just this size for a while."""
        return self._sign("put_object", {**self._object(key), "ContentLength": size_bytes})

    def part_address(self, begun: StoredObject, number: int, size_bytes: int) -> str:
        """An address at which everybody may write a part of just this size for a while."""
        part = {"PartNumber": number, "ContentLength": size_bytes}
        return self._sign("upload_part", {**self._part_upload(begun), **part})

    def size(self, key: str) -> int | None:
        """Size of an object in bytes; None: there is none.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        with self._explain(key):
            try:
                # A HEAD would say it too, but not why it is refused.
                answer = self._client.get_object(**self._object(key), Range="bytes=0-0")
            except ClientError as error:
                if _code(error) in _MISSING:
                    return None
                if _code(error) == _EMPTY:
                    return 0
                raise
            answer["Body"].close()
        whole = answer.get("ContentRange", "").rpartition("/")[2]
        return int(whole) if whole.isdecimal() else int(answer["ContentLength"])

    def read(self, key: str, span: Span, write: Callable[[int, bytes], None]) -> bool:
        """Read bytes of an object.

        Args:
            key: Of the object.
            span: Which bytes.
            write: Takes pieces in order, and where each begins.

        Returns:
            Whether there is such an object. It may be shorter.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        byte_range = f"bytes={span.start}-{span.end - 1}"
        with self._explain(key):
            try:
                body = self._client.get_object(**self._object(key), Range=byte_range)["Body"]
            except ClientError as error:
                if _code(error) in _MISSING | {_EMPTY}:
                    return False
                raise
            give_up_s = time.monotonic() + transfer_timeout_s(span.end - span.start, _TIMEOUT_MS)
            at = span.start
            with body:
                while at < span.end and (piece := body.read(min(_STEP_BYTES, span.end - at))):
                    write(at, piece)
                    at += len(piece)
                    self._refuse_when_over()
                    if time.monotonic() > give_up_s:
                        raise BucketError(f"the object store is too slow ({key})")
        return True

    def write(self, key: str, path: Path) -> None:
        """Write a file's bytes as an object, large ones in parts.

        Raises:
            BucketError: The store refused it, or did not answer.
            OSError: The file cannot be read.
        """
        with self._explain(key):
            self._client.upload_file(
                str(path),
                *self._object(key).values(),
                Callback=lambda _: self._refuse_when_over(),
                Config=_UPLOADING,
            )

    def copy(self, source: str, key: str) -> None:
        """Have the store copy an object, of which no byte comes here.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        with self._explain(key):
            self._client.copy_object(**self._object(key), CopySource=self._object(source))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, there or not.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        # One by one: of many at once stores want checksums that not all understand.
        for key in keys:
            with self._explain(key):
                self._client.delete_object(**self._object(key))

    def begin(self, key: str) -> StoredObject:
        """Begin to write an object in parts, or go on with that.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        for upload in self.part_uploads(key):
            if upload.key == key:
                return upload
        with self._explain(key):
            answer = self._client.create_multipart_upload(**self._object(key))
        return StoredObject(key, 0.0, upload_id=answer["UploadId"])

    def parts(self, begun: StoredObject) -> dict[int, str]:
        """Tag of each part that came, by its number.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        return {
            part["PartNumber"]: str(part["ETag"])
            for part in self._pages("list_parts", "Parts", **self._part_upload(begun))
        }

    def finish(self, begun: StoredObject, tags: Mapping[int, str]) -> None:
        """Make an object of parts.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        parts = [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]
        with self._explain(begun.key):
            self._client.complete_multipart_upload(
                **self._part_upload(begun), MultipartUpload={"Parts": parts}
            )

    def abandon(self, begun: StoredObject) -> None:
        """Drop what came of an object in parts.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        with self._explain(begun.key):
            self._client.abort_multipart_upload(**self._part_upload(begun))

    def objects(self) -> list[StoredObject]:
        """All objects.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        pages = self._pages("list_objects_v2", "Contents", **self._beginning(""))
        return [
            StoredObject(
                self._key(each["Key"]), each["LastModified"].timestamp(), int(each["Size"])
            )
            for each in pages
        ]

    def part_uploads(self, folder: str) -> list[StoredObject]:
        """All uploads in parts whose keys begin so.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        pages = self._pages("list_multipart_uploads", "Uploads", **self._beginning(folder))
        return [
            StoredObject(
                self._key(each["Key"]), each["Initiated"].timestamp(), upload_id=each["UploadId"]
            )
            for each in pages
        ]

    def close(self) -> None:
        """Break off what is being read and written, for good."""
        self._is_over.set()

    def _refuse_when_over(self) -> None:
        if self._is_over.is_set():
            raise BucketError("this coordinator stops")

    def _pages(self, operation: str, what: str, **arguments: Any) -> list[Any]:
        with self._explain(arguments.get("Key", arguments.get("Prefix", ""))):
            pages = self._client.get_paginator(operation).paginate(**arguments)
            try:
                return [each for page in pages for each in page.get(what, ())]
            except ClientError as error:
                # Some stores say so where they have none.
                if _code(error) == "NoSuchUpload":
                    return []
                raise

    @contextmanager
    def _explain(self, what: str) -> Iterator[None]:
        """Let whatever the store refuses, or does not answer, be one error."""
        try:
            yield
        except ClientError as client_error:
            error = client_error.response.get("Error", {})
            answer_text = f"{error.get('Code', '')} {error.get('Message', '')}".strip()
            detail = f"the object store answers {answer_text} ({what})"
            raise BucketError(detail, _code(client_error)) from client_error
        except HTTPClientError as client_error:
            kind, url = type(client_error).__name__, self._client.meta.endpoint_url
            detail = f"the object store at {url} does not answer: {kind} ({what})"
            raise BucketError(detail, kind) from client_error
        except (BotoCoreError, S3UploadFailedError) as client_error:
            raise BucketError(
                f"{client_error} ({what})", type(client_error).__name__
            ) from client_error

    def _sign(self, operation: str, parameters: dict[str, Any]) -> str:
        try:
            return str(self._client.generate_presigned_url(operation, parameters, _EXPIRY_S))
        except BotoCoreError as wrong:
            raise BucketError(f"nothing can be signed: {wrong}") from wrong

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _part_upload(self, begun: StoredObject) -> dict[str, str]:
        return {**self._object(begun.key), "UploadId": begun.upload_id}

    def _beginning(self, folder: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Prefix": self._prefix + folder}

    def _key(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def _client(told: dict[str, str]) -> Any:
    client = boto3.session.Session().client("s3", config=_CLIENT, **told)
    if client.meta.endpoint_url.endswith(".amazonaws.com"):
        # The one address for all regions does not serve those that were opened later.
        config = _CLIENT.merge(Config(s3={"addressing_style": "virtual"}))
        client = boto3.session.Session().client("s3", config=config, **told)
    return client


def _code(refused: ClientError) -> str:
    return str(refused.response.get("Error", {}).get("Code", ""))
