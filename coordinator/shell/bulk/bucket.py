"""Objects of one bucket under one prefix, by the S3 protocol. Every call but signing blocks.

Endpoint, region and keys come from where every S3 program looks for them: the variables
``AWS_ENDPOINT_URL_S3``, ``AWS_DEFAULT_REGION``, ``AWS_ACCESS_KEY_ID`` and
``AWS_SECRET_ACCESS_KEY``, or the file that ``AWS_SHARED_CREDENTIALS_FILE`` names.
"""

import re
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
from hypergpu.part_file import Span
from hypergpu.units import several

_ADDRESS = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[^?#]*))?")
_EXPIRY_S = 16 * 60
"""Stores refuse everything when clocks are 15 minutes apart; until then an address must hold."""
_STEP_BYTES = 1 << 20
_DELETE_MAX = 1000
"""Most keys of one call."""
_MISSING = frozenset({"NoSuchKey", "404"})
_UPLOADING = TransferConfig(
    multipart_threshold=64 << 20, multipart_chunksize=16 << 20, max_concurrency=4
)
_CLIENT = Config(
    signature_version="s3v4",
    connect_timeout=5,
    read_timeout=20,
    retries={"total_max_attempts": 3, "mode": "standard"},
    max_pool_connections=32,
    # Not every store knows the newer checksums, and digests are compared anyway.
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
)


class StoredObject(NamedTuple):
    """An object, or an upload in parts that has not ended."""

    key: str
    since_s: float
    """When it was written or begun, in Unix time of the store."""
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
        found = _ADDRESS.fullmatch(address)
        if found is None:
            detail = f"blobs: {address!r} is not of the form s3://BUCKET/PREFIX"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)
        self._bucket = found["bucket"]
        parts = [*(found["prefix"] or "").split("/"), folder]
        self._prefix = "".join(f"{part}/" for part in parts if part)
        try:
            self._client: Any = boto3.session.Session().client("s3", config=_CLIENT, **told)
        except (BotoCoreError, ValueError) as wrong:
            raise HyperGPUError(Reason.ARGUMENT_INVALID, f"blobs: {wrong}") from wrong

    def check(self) -> None:
        """Write, read and delete one object.

        Raises:
            HyperGPUError: STORE_UNREACHABLE, with what the store says.
        """
        key, content = "check", b"HyperGPU"
        with self._explain("a test object"):
            self._client.put_object(**self._object(key), Body=content)
            read = self._client.get_object(**self._object(key))["Body"].read()
            self._client.delete_object(**self._object(key))
        if read != content:
            detail = "what was written to the object store is not what it gives back"
            raise HyperGPUError(Reason.STORE_UNREACHABLE, detail)

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
        """Size in bytes of an object that is not empty; None: there is none.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        with self._explain(key):
            try:
                # A HEAD would say it too, but not why it is refused.
                answer = self._client.get_object(**self._object(key), Range="bytes=0-0")
            except ClientError as refused:
                if _code(refused) in _MISSING:
                    return None
                raise
        answer["Body"].close()
        return int(answer["ContentRange"].rpartition("/")[2])

    def read(self, key: str, span: Span, write: Callable[[int, bytes], None]) -> bool:
        """Read bytes of an object.

        Args:
            key: Of the object.
            span: Which bytes.
            write: Takes pieces in order, and where each begins.

        Returns:
            Whether there is such an object. It may be shorter.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        wanted = f"bytes={span.start}-{span.end - 1}"
        with self._explain(key):
            try:
                body = self._client.get_object(**self._object(key), Range=wanted)["Body"]
            except ClientError as refused:
                if _code(refused) in _MISSING | {"InvalidRange"}:
                    return False
                raise
            at = span.start
            with body:
                while at < span.end and (piece := body.read(min(_STEP_BYTES, span.end - at))):
                    write(at, piece)
                    at += len(piece)
        return True

    def write(self, key: str, path: Path) -> None:
        """Write a file's bytes as an object, large ones in parts.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
            OSError: The file cannot be read.
        """
        with self._explain(key):
            self._client.upload_file(str(path), *self._object(key).values(), Config=_UPLOADING)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, there or not.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        for start in range(0, len(keys), _DELETE_MAX):
            some = keys[start : start + _DELETE_MAX]
            named = [{"Key": self._prefix + key} for key in some]
            with self._explain(several(len(some), "object")):
                self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": named, "Quiet": True}
                )

    def begin(self, key: str) -> StoredObject:
        """Begin to write an object in parts, or go on with that.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        for begun in self.part_uploads(key):
            if begun.key == key:
                return begun
        with self._explain(key):
            answer = self._client.create_multipart_upload(**self._object(key))
        return StoredObject(key, 0.0, answer["UploadId"])

    def parts(self, begun: StoredObject) -> dict[int, str]:
        """Tag of each part that came, by its number.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        return {
            part["PartNumber"]: str(part["ETag"])
            for part in self._pages("list_parts", "Parts", **self._part_upload(begun))
        }

    def finish(self, begun: StoredObject, tags: Mapping[int, str]) -> None:
        """Make an object of parts.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        parts = [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]
        with self._explain(begun.key):
            self._client.complete_multipart_upload(
                **self._part_upload(begun), MultipartUpload={"Parts": parts}
            )

    def abandon(self, begun: StoredObject) -> None:
        """Drop what came of an object in parts.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        with self._explain(begun.key):
            self._client.abort_multipart_upload(**self._part_upload(begun))

    def objects(self, folder: str) -> list[StoredObject]:
        """All objects whose keys begin so.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        found = self._pages("list_objects_v2", "Contents", **self._beginning(folder))
        return [
            StoredObject(self._key(each["Key"]), each["LastModified"].timestamp()) for each in found
        ]

    def part_uploads(self, folder: str) -> list[StoredObject]:
        """All uploads in parts whose keys begin so.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        found = self._pages("list_multipart_uploads", "Uploads", **self._beginning(folder))
        return [
            StoredObject(self._key(each["Key"]), each["Initiated"].timestamp(), each["UploadId"])
            for each in found
        ]

    def _pages(self, operation: str, what: str, **arguments: Any) -> list[Any]:
        with self._explain(arguments.get("Key", arguments.get("Prefix", ""))):
            pages = self._client.get_paginator(operation).paginate(**arguments)
            try:
                return [each for page in pages for each in page.get(what, ())]
            except ClientError as refused:
                # Some stores say so where they have none.
                if _code(refused) == "NoSuchUpload":
                    return []
                raise

    @contextmanager
    def _explain(self, what: str) -> Iterator[None]:
        """Let whatever the store refuses, or does not answer, be one error."""
        try:
            yield
        except ClientError as refused:
            error = refused.response.get("Error", {})
            said = f"{error.get('Code', '')} {error.get('Message', '')}".strip()
            detail = f"the object store answers {said} ({what})"
            raise HyperGPUError(Reason.STORE_UNREACHABLE, detail) from refused
        except HTTPClientError as broken:
            kind, url = type(broken).__name__, self._client.meta.endpoint_url
            detail = f"the object store at {url} does not answer: {kind} ({what})"
            raise HyperGPUError(Reason.STORE_UNREACHABLE, detail) from broken
        except (BotoCoreError, S3UploadFailedError) as broken:
            raise HyperGPUError(Reason.STORE_UNREACHABLE, f"{broken} ({what})") from broken

    def _sign(self, operation: str, parameters: dict[str, Any]) -> str:
        try:
            return str(self._client.generate_presigned_url(operation, parameters, _EXPIRY_S))
        except BotoCoreError as wrong:
            detail = f"nothing can be signed: {wrong}"
            raise HyperGPUError(Reason.STORE_UNREACHABLE, detail) from wrong

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _part_upload(self, begun: StoredObject) -> dict[str, str]:
        return {**self._object(begun.key), "UploadId": begun.upload_id}

    def _beginning(self, folder: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Prefix": self._prefix + folder}

    def _key(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def _code(refused: ClientError) -> str:
    return str(refused.response.get("Error", {}).get("Code", ""))
