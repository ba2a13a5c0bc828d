"""`hypergpu.client`, the module that programs written for version 0.1 import."""

import hypergpu
import hypergpu.client
import hypergpu.user.client


def test_it_hands_on_every_public_name_of_the_client() -> None:
    public = hypergpu.client.__all__
    assert public == hypergpu.user.client.__all__
    for name in public:
        assert getattr(hypergpu.client, name) is getattr(hypergpu.user.client, name)


def test_connect_of_the_facade_is_that_of_the_client() -> None:
    assert hypergpu.connect is hypergpu.client.connect
