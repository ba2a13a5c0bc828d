"""Keys of accounts, in this machine's folders or in a keystore."""

from pathlib import Path

from hypergpu.crypto import IdentityKey
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys import passphrase_beside, passphrase_of_file, stored_secret
from hypergpu.node_report import DEVICE_FOLDERS
from hypergpu.user.client.settings import resolve_settings

NODE_KEY = Path("identity.key")
COORDINATOR_KEY = Path("identity/coordinator.key")


def folder_named(setting: str, given: Path | None) -> Path:
    """A folder by the command's option, else by the settings: ``state_dir`` or ``data_dir``."""
    settings = resolve_settings({setting: str(given) if given else None})
    return Path(settings[setting].value).expanduser()


def device_folders(machine: Path) -> list[Path]:
    """Folders of the nodes of a machine's further devices, each with a key of its own."""
    return sorted(key.parent for key in machine.glob(f"{DEVICE_FOLDERS}/{NODE_KEY}"))


def _folder_with_passphrase(folder: Path) -> Path:
    """The folder beside which a key's passphrase lies: a machine's for all of its devices."""
    machine = folder.absolute().parent
    is_device = folder.absolute() in device_folders(machine) and (machine / NODE_KEY).exists()
    return machine if is_device else folder


def open_key(folder: Path, key: Path, passphrase_file: Path | None) -> IdentityKey:
    """The key in a daemon's folder."""
    path = folder / key
    if not path.exists():
        raise HyperGPUError(
            Reason.FILE_UNUSABLE,
            f"there is no key {path}",
            fix="name the folder: --state-dir of a node, --data-dir of a coordinator",
        )
    if passphrase_file:
        passphrase = passphrase_of_file(passphrase_file)
    else:
        passphrase = passphrase_beside(_folder_with_passphrase(folder), path)
    return IdentityKey(stored_secret(path, passphrase))


def open_keystore(path: Path, passphrase_file: Path) -> IdentityKey:
    """The key in a keystore file of its own, as wallets export it."""
    if not path.exists():
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"there is no key {path}")
    return IdentityKey(stored_secret(path, passphrase_of_file(passphrase_file)))
