"""A boolean build setting."""

def _impl(_ctx):
    return []

bool_setting = rule(
    implementation = _impl,
    build_setting = config.bool(flag = True),
)
