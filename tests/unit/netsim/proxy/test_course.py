from netsim.network.course import WorldCourse
from netsim.network.world_file import parse_world
from netsim.proxy.messages import Proxied
from netsim.proxy.node import course_of

WORLD = parse_world('seed = 3\n[[nodes]]\nname = "van"\nprofile = "lte-moving"\n', source="w.toml")


def test_a_proxied_link_varies_as_the_world_has_it() -> None:
    node = WORLD.nodes[0]
    plan = Proxied(
        name=node.name,
        link=node.link,
        forwards=(),
        variation=node.variation,
        traces=node.traces,
        starts_at_hour=WORLD.starts_at_hour,
    )
    proxied, described = course_of(plan, WORLD.seed), WorldCourse(WORLD)
    moments = range(0, 60_000_000, 777_777)
    links = [proxied.at(at_us) for at_us in moments]
    assert links == [described.state("van", at_us).link for at_us in moments]
    assert len({link.up.bits_per_s for link in links}) > 10
