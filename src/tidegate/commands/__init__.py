"""The commands: one module per group, which `cli` joins. All of them use `command_line` and `terminal`.

Commands reach a broker only through its client, except those that run one (`serve`, `slice`, `cluster up`).
"""
