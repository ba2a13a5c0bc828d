"""Calls, answers, events and errors of a contract, by the names that its ABI gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from eth_abi.abi import decode, encode
from eth_abi.exceptions import DecodingError

from hypergpu.chain.rpc.answers import Event
from hypergpu.chain.rpc.errors import RpcGarbledError
from hypergpu.keys.keccak import keccak

_SELECTOR_BYTES = 4
Entry = Mapping[str, Any]


class Abi:
    """What one contract understands."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._functions = {each["name"]: each for each in entries if each["type"] == "function"}
        self._selectors = {name: _selector(each) for name, each in self._functions.items()}
        self._inputs = {name: _types(each["inputs"]) for name, each in self._functions.items()}
        errors = [each for each in entries if each["type"] == "error"]
        self._errors = {_selector(each): each for each in errors}
        events = [each for each in entries if each["type"] == "event"]
        self._events = {keccak(_signature(each).encode()): each for each in events}
        self._constructor = next((e for e in entries if e["type"] == "constructor"), None)

    def call(self, name: str, *values: object) -> bytes:
        """The bytes that call a function.

        Raises:
            KeyError: there is no such function.
            eth_abi.exceptions.EncodingError: a value does not fit its type.
        """
        return self._selectors[name] + encode(self._inputs[name], values)

    def selector(self, name: str) -> bytes:
        """The 4 bytes that a call of a function begins with.

        Raises:
            KeyError: there is no such function.
        """
        return self._selectors[name]

    def constructor(self, *values: object) -> bytes:
        """The bytes that go behind a contract's code when it is made."""
        inputs = [] if self._constructor is None else self._constructor["inputs"]
        return encode(_types(inputs), values)

    def answer(self, name: str, content: bytes) -> tuple[Any, ...]:
        """Read what a function gave back. Structs are tuples.

        Raises:
            RpcGarbledError: it is something else.
        """
        try:
            return decode(_types(self._functions[name]["outputs"]), content)
        except DecodingError as broken:
            raise RpcGarbledError(f"{name} gave {content[:64].hex()}: {broken}") from None

    def topic(self, name: str) -> bytes:
        """What an event's first topic is.

        Raises:
            StopIteration: there is no such event.
        """
        return next(topic for topic, entry in self._events.items() if entry["name"] == name)

    def event(self, event: Event) -> tuple[str, dict[str, Any]] | None:
        """An event's name and its values by name; None for one of another contract."""
        entry = self._events.get(event.topics[0]) if event.topics else None
        if entry is None:
            return None
        indexed = [each for each in entry["inputs"] if each["indexed"]]
        plain = [each for each in entry["inputs"] if not each["indexed"]]
        if len(event.topics) != 1 + len(indexed):
            return None
        try:
            values = [
                decode([_type(each)], topic)[0]
                for each, topic in zip(indexed, event.topics[1:], strict=True)
            ]
            values += decode(_types(plain), event.body)
        except DecodingError as broken:
            raise RpcGarbledError(f"event {entry['name']} cannot be read: {broken}") from None
        names = [each["name"] for each in (*indexed, *plain)]
        return str(entry["name"]), dict(zip(names, values, strict=True))

    @property
    def errors(self) -> frozenset[str]:
        """The names of what the contract may say when it reverts."""
        return frozenset(each["name"] for each in self._errors.values())

    def error(self, content: bytes) -> str:
        """What a contract said when it reverted, in its own words."""
        told = self.failure(content)
        if told is None:
            return f"0x{content[:36].hex()}" if content else "without a word"
        name, values = told
        shown = [
            f"{each} {value.hex() if isinstance(value, bytes) else value}"
            for each, value in values.items()
        ]
        return f"{name}({', '.join(shown)})"

    def failure(self, content: bytes) -> tuple[str, dict[str, Any]] | None:
        """An error's name and its values by name; None for one of another contract."""
        entry = self._errors.get(content[:_SELECTOR_BYTES])
        if entry is None:
            return None
        try:
            values = decode(_types(entry["inputs"]), content[_SELECTOR_BYTES:])
        except DecodingError:
            return None
        names = [each["name"] for each in entry["inputs"]]
        return str(entry["name"]), dict(zip(names, values, strict=True))


def _selector(entry: Entry) -> bytes:
    return keccak(_signature(entry).encode())[:_SELECTOR_BYTES]


def _signature(entry: Entry) -> str:
    return f"{entry['name']}({','.join(_types(entry['inputs']))})"


def _types(inputs: Sequence[Entry]) -> list[str]:
    return [_type(each) for each in inputs]


def _type(entry: Entry) -> str:
    """The canonical type: a struct is the tuple of its fields."""
    name = str(entry["type"])
    if not name.startswith("tuple"):
        return name
    return f"({','.join(_types(entry['components']))}){name.removeprefix('tuple')}"
