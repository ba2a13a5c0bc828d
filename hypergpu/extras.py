"""The extras of this package: which one brings a package that is not installed."""

from hypergpu.errors import HyperGPUError, Reason

_PACKAGES = {
    "chain": ("eth_abi", "eth_account", "eth_utils", "hexbytes", "urllib3", "web3"),
    "postgresql": ("psycopg",),
    "torch": ("PIL", "torch", "torchvision"),
}


def missing_extra(missing: ModuleNotFoundError) -> HyperGPUError | None:
    """The error that names the extra to install; None: the package belongs to none of them."""
    package = (missing.name or "").partition(".")[0]
    for extra, packages in _PACKAGES.items():
        if package in packages:
            detail = f"this needs the package {package}, which is not installed"
            fix = f"install the extra: pip install 'hypergpu[{extra}]'"
            return HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix)
    return None
