"""The reader of the documentation notices a page that is wrong."""

from tests.docs.transcript import Command, File, steps

PAGE = """
Text.

```yaml file=job.yaml
name: x
```

```sh
not run
```

```console
$ yard run job.yaml
x succeeded after ... s
done
$ yard jobs  # exits with 4
```
"""


def test_a_page_is_its_files_and_commands_in_order():
    assert list(steps(PAGE)) == [
        File("job.yaml", "name: x\n"),
        Command("yard run job.yaml", 0, ["x succeeded after ... s", "done"]),
        Command("yard jobs", 4, []),
    ]


def test_promised_lines_are_found_in_order_with_anything_between():
    command = Command("run", 0, ["x succeeded after ... s", "done"])
    assert command.missing_from("start\nyard: x succeeded after 3 s\nmore\ndone\n") is None


def test_a_promised_line_that_does_not_come_is_named():
    assert Command("run", 0, ["b"]).missing_from("a\n") == "b"


def test_promised_lines_in_another_order_are_missing():
    assert Command("run", 0, ["b", "a"]).missing_from("a\nb\n") == "a"
