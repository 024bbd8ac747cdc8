import datetime

import pytest

from models.chat_template import render
from models.errors import ModelError
from tests.models.common import byte_bpe

TURNS = [{"role": "user", "content": "a < b"}, {"role": "assistant", "content": "é"}]


def test_chatml():
    text = byte_bpe().render_chat(TURNS)
    assert text == "<|im_start|>user\na < b<|im_end|>\n<|im_start|>assistant\né<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "source, expected",
    [
        # Block lines leave no whitespace behind.
        ("{% for m in messages %}\n    {% if m.role == 'user' %}\nU\n    {% endif %}\n{% endfor %}\n", "U\n"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "a < b"}, {"role": "assistant", "content": "é"}]'),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "é"),
        ("{{ strftime_now('%Y') }}", str(datetime.date.today().year)),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ bos_token }}{{ enable_thinking }}", "<|im_start|>False"),
    ],
)
def test_what_templates_rely_on(source, expected):
    tokenizer = byte_bpe(chat_template=source)
    assert tokenizer.render_chat(TURNS, enable_thinking=False) == expected


def test_a_template_may_refuse():
    with pytest.raises(ModelError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", messages=TURNS)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 + 'a' }}"]
)
def test_broken_and_unsafe_templates_are_refused(source):
    with pytest.raises(ModelError, match="chat template failed"):
        render(source, messages=TURNS)


def test_malformed_conversations_are_refused():
    with pytest.raises(ModelError, match=r"needs 'role' and 'content', got the keys \['text'\]"):
        byte_bpe().render_chat([{"text": "hello"}])
    with pytest.raises(ModelError, match="no chat template"):
        byte_bpe(chat_template=None).render_chat("hello")
