"""Chat templates that behave like the published templates of five families, written for these tests."""

LLAMA2 = (
    "{% if messages[0].role == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('by turns') }}{% endif %}"
    "{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""System message in the first question, a bos token in each turn, no generation prompt."""

# System message in the last question, tools before it: each new turn changes the text of earlier turns.
MISTRAL = (
    "{{ bos_token }}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% set is_last = loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and is_last else '' }}"
    "{{ '[INST] ' + (messages[0].content + '\n\n' if messages[0].role == 'system' and is_last else '') }}"
    "{{ m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}"
    "{{ '[TOOL_CALLS] [' }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson + (', ' if not loop.last else '') }}{% endfor %}"
    "{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + {'content': m.content} | tojson + '[/TOOL_RESULTS]' }}"
    "{% endif %}{% endfor %}"
)
MISTRAL_TOKENS = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip

_HEADER = "'<|start_header_id|>' + {role} + '<|end_header_id|>\n\n'"
LLAMA31 = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{{ " + _HEADER.format(role="'system'") + " + 'Cutoff: 2023\n\n' + system + '<|eot_id|>' }}"
    "{% for m in messages %}"
    "{% if m.role == 'user' and tools and loop.first %}"
    "{{ " + _HEADER.format(role="'user'") + " }}"
    "{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}{{ m.content | trim + '<|eot_id|>' }}"
    "{% elif 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    "{{ " + _HEADER.format(role="'assistant'") + " }}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ "
    + _HEADER.format(role="'ipython'")
    + " + m.content | tojson + '<|eot_id|>' }}"
    "{% else %}{{ " + _HEADER.format(role="m.role") + " + m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ " + _HEADER.format(role="'assistant'") + " }}{% endif %}"
)
"""Own system message, tools in the first question, at most one tool call per turn."""

_QWEN_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{{ messages[0].content if messages[0].role == 'system' else DEFAULT }}"
    "{{ '\n\n<tools>' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
)
_QWEN_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first or content }}"
    "{% set c = c.function %}"
    '{{ \'<tool_call>\n{"name": "\' + c.name + \'", "arguments": \' + c.arguments | tojson + '
    "'}\n</tool_call>' }}{% endfor %}"
)
_QWEN_TOOL = (
    "{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{{ '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}"
)
_QWEN_NO_THOUGHTS = (
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
_QWEN_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

QWEN25 = (
    "{% set DEFAULT = 'Be helpful.' %}" + _QWEN_TOOLS +
    "{% elif messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\n' + DEFAULT + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'system' and loop.first and tools %}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + content }}" + _QWEN_CALLS + "{{ '<|im_end|>\n' }}" + _QWEN_TOOL +
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + _QWEN_PROMPT
)  # fmt: skip
"""Own system message, tools in the system message."""

QWEN3 = (
    "{% set DEFAULT = '' %}" + _QWEN_TOOLS + "{% endif %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'system' and loop.first and tools %}"
    "{% elif m.role == 'assistant' %}"
    "{% set thoughts = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thoughts) %}"
    "{{ '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}" + _QWEN_CALLS + "{{ '<|im_end|>\n' }}" + _QWEN_TOOL +
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + _QWEN_PROMPT.replace("{% endif %}", _QWEN_NO_THOUGHTS + "{% endif %}")
)  # fmt: skip
"""Thoughts only after the last question, and an empty thought block in the last answer."""
