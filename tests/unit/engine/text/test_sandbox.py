# SPDX-License-Identifier: Apache-2.0
"""The sandbox: what a template can't reach, how long it can't run and how large it can't grow."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from server.engine.text import sandbox
from server.engine.text.sandbox import TemplateFault, TemplateProgram

MESSAGES = [{"role": "user", "content": 'a <b> & "c"\n'}, {"role": "assistant", "content": " 龘 "}]
DOUBLE = "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}"
LAUGH = "{% set x = ['ha'] * 100 %}{% set x = [x] * 100 %}{% set x = [x] * 100 %}{% set x = [x] * 100 %}"


def render(source, **variables):
    return TemplateProgram(source).render({"messages": MESSAGES, **variables})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n  {% if loop.first %}\n<{{ m.role }}>\n{% endif %}\n{% endfor %}",
         "<user>\n"),
        ("{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
         "user"),
        ("{% for m in messages %}{% break %}{% endfor %}{{ messages | length }}", "2"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a <b> & \\"c\\"\\n"}'),
        ("{{ [1, {'b': 2, 'a': '龘'}] | tojson(indent=1, sort_keys=True) }}",
         '[\n 1,\n {\n  "a": "龘",\n  "b": 2\n }\n]'),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}.", " 龘 ."),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
         "2"),
        ("{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say('a') ~ say(1) ~ none }}", "[a][1]None"),
        ("{{ messages[::-1][0].role.upper().split('S') | join('-') }}", "A--I-TANT"),
        ("{{ 'a%d' % 5 }} {{ '{:>3}|{}'.format(1, 'x') }} {{ '%s' | format('y') }} {{ 7 % 4 }}",
         "a5   1|x y 3"),
        ("{{ 'a\nb' | indent(2) }} {{ 'x' * 3 }} {{ 2 ** 5 }} {{ 'aXa'.replace('X', 'y') | replace('a', '') }}",
         "a\n  b xxx 32 y"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ loop is defined }}", "a1False"),
        ("{% for a in [1, 2] recursive %}{{ a }}{% if a == 2 %}{{ loop([1]) }}{% endif %}{% endfor %}", "121"),
        ("{{ tools is none }} {{ bos is defined }} {{ (1, 2) | list }} {{ dict(a=1) }}",
         "True False [1, 2] {'a': 1}"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | join(', ') }}", "user"),
        ("{{ ', '.join(messages | map(attribute='role')) }}", "user, assistant"),
    ],
)  # fmt: skip
def test_chat_templates_work(source, expected):
    """What models' templates use gives what transformers gives: blocks trimmed, JSON as Python spells it."""
    assert render(source, tools=None) == expected


def test_the_date_is_todays():
    """`strftime_now` tells the day, in UTC."""
    assert render("{{ strftime_now('%Y-%m-%d') }}") == datetime.now(UTC).strftime("%Y-%m-%d")


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''['__class__'] }}{{ ''['__class__'].x }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages | attr('__class__') }}",
        "{{ [messages] | map(attribute='__class__.__mro__') | list }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ open('/etc/passwd').read() }}",
        "{{ lipsum() }}",
        "{{ 'a' | center(9) }}",
    ],
)
def test_nothing_can_be_reached(source):
    """No attribute of Python's own, no file, no module, and nothing of ours can be changed."""
    before = [dict(each) for each in MESSAGES]
    with pytest.raises(TemplateFault):
        render(source)
    assert before == MESSAGES


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro r(n) %}{% if n %}{{ r(n - 1) }}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(90) }}",
        "{% macro r() %}{{ r() }}{% endmacro %}{{ r() }}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% for a in range(99999) %}{{ 99998 in range(99999) | map('abs') }}{% endfor %}",
        "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
        "{% if 1 %}" * 3000,
    ],
)
def test_nothing_runs_long(source, monkeypatch):
    """Loops in loops, recursion in every form and deep nesting end within the budget."""
    monkeypatch.setattr(sandbox, "CPU_S_MAX", 0.05)
    with pytest.raises(TemplateFault):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 9999 ** 9999 ** 9999 }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        DOUBLE + "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = d(ns.x) %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + ['a' * 9999] %}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ ('%s' * 9999) | format(*(['a' * 9999] * 9999)) }}",
        "{{ 'a\n' | indent(1000000000) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ ('a' * 9999).replace('', 'a' * 9999) }}",
        "{{ 'a' * 9999 | replace('', 'a' * 9999) }}",
        "{{ ('a' * 9999).join(['b'] * 9999) }}",
        "{{ (['b'] * 9999) | join('a' * 9999) }}",
        LAUGH + "{{ x }}",
        LAUGH + "{{ x ~ '' }}",
        LAUGH + "{{ x | string | length }}",
        LAUGH + "{{ x | tojson | length }}",
        LAUGH + "{{ '%s' % (x,) }}",
        LAUGH + "{{ '{}'.format(x) }}",
        LAUGH + "{{ x | upper | length }}",
        "{% set x = [2 ** 9999] * 9999 %}{{ x }}",
    ],
)
def test_nothing_grows_large(source):
    """A value too large is refused before it is made, by whatever operation and also when it is but shown."""
    with pytest.raises(TemplateFault, match="it "):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 'a' | nosuch }}", "{{ 1", "x" * (sandbox.SOURCE_CHARS_MAX + 1)]
)
def test_nonsense_is_refused_at_once(source):
    """A template that does not parse is refused when it is made, not when somebody chats."""
    with pytest.raises(TemplateFault):
        TemplateProgram(source)


def test_refusals_are_short():
    """A template's own refusal is passed on; one that faults is named by its kind; neither fills a log."""
    with pytest.raises(TemplateFault, match=r"^no system$"):
        render("{{ raise_exception('no system') }}")
    with pytest.raises(TemplateFault, match=r"^ZeroDivisionError: ") as caught:
        render("{{ 1 / 0 }}")
    assert len(str(caught.value)) < 100
    with pytest.raises(TemplateFault) as caught:
        render("{{ raise_exception('x' * 9999) }}")
    assert len(str(caught.value)) <= sandbox.MESSAGE_CHARS_MAX


def test_threads_have_their_own_budgets(monkeypatch):
    """Many renderings at once use up none but their own."""
    monkeypatch.setattr(sandbox, "BUILT_BYTES_MAX", 100_000)
    program = TemplateProgram("{% for i in range(900) %}{{ i }}{% endfor %}")
    expected = "".join(map(str, range(900)))
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: program.render({}), range(40))) == {expected}
