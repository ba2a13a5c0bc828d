"""The coordinator's signing key: owner of its jobs and signer of their receipts."""

from pathlib import Path

from hypergpu.keys.keyfile import passphrase_beside, stored_secret
from hypergpu.keys.passphrase import passphrase_of_file
from hypergpu.keys.signature import IdentityKey

KEY_FILE = Path("identity/coordinator.key")


def coordinator_key(data_dir: Path, passphrase_file: Path | None = None) -> IdentityKey:
    """The key in a coordinator's folder, made on the first start and stored encrypted. Blocks.

    Args:
        data_dir: The coordinator's folder.
        passphrase_file: Holds the key's passphrase; None: one that is made for it and kept beside
            the folder.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the key or its passphrase is damaged or missing, or the
            passphrase is another one, or others can read either.
    """
    path = data_dir / KEY_FILE
    passphrase = (
        passphrase_beside(data_dir, path)
        if passphrase_file is None
        else passphrase_of_file(passphrase_file)
    )
    return IdentityKey(stored_secret(path, passphrase))
