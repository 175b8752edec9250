"""The table of flags: one source for the checks and the documentation."""

from pathlib import Path

from megatron_longseq import flag_table


def test_the_documentation_is_made_from_the_table():
    assert Path("docs/flags.md").read_text() == flag_table.as_markdown(), (
        "run: python -m megatron_longseq.flag_table > docs/flags.md"
    )


def unknown_names():
    from megatron_longseq.run_config import known_arguments

    known = {a.dest: a.option_strings for a in known_arguments()._actions}
    return [
        rule.name
        for rule in flag_table.RULES
        if rule.name not in known or rule.flag not in known[rule.name]
    ]


def test_every_flag_of_the_table_is_one_of_megatrons(megatron_ranks):
    assert megatron_ranks.run(unknown_names, world_size=1)[0] == []
