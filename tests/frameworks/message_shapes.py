"""Messages as frameworks and providers store them, each in a form of its own.

Each string is unique in the table, except for the words of a format, so a test can look for it on a page.
``BYTES`` and data URLs stand for the content of files, of which interfaces show the size.
"""

from __future__ import annotations

from typing import Any, Final

BYTES: Final = "QUJDREVGR0g="
PNG: Final = f"data:image/png;base64,{BYTES}"

Shapes = dict[str, dict[str, Any]]

OPENAI_CHAT: Final[Shapes] = {
    "text": {"role": "user", "content": "chat text", "name": "chat author"},
    "developer": {"role": "developer", "content": [{"type": "text", "text": "chat instructions"}]},
    "files": {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": "https://chat.example/a.png", "detail": "chat-high"}},
            {"type": "input_audio", "input_audio": {"data": BYTES, "format": "chat-wav"}},
            {"type": "file", "file": {"filename": "chat.pdf", "file_data": PNG}},
            {"type": "file", "file": {"file_id": "chat-file-id"}},
        ],
    },
    "refusal": {"role": "assistant", "content": None, "refusal": "chat refusal"},
    "refusal part": {"role": "assistant", "content": [{"type": "refusal", "refusal": "chat refused part"}]},
    "calls": {
        "role": "assistant",
        "content": "chat before calls",
        "tool_calls": [
            {
                "id": "chat-call-1",
                "type": "function",
                "function": {"name": "chat_find", "arguments": '{"to": "chat argument"}'},
            },
            {"id": "chat-call-2", "type": "custom", "custom": {"name": "chat_custom", "input": "chat input"}},
        ],
    },
    "result": {"role": "tool", "tool_call_id": "chat-call-1", "content": "chat result"},
    "result in parts": {
        "role": "tool",
        "tool_call_id": "chat-call-2",
        "content": [{"type": "text", "text": "chat result part", "citation": "chat result citation"}],
    },
    "function call": {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "chat_old", "arguments": '{"a": "chat old argument"}'},
    },
    "function result": {"role": "function", "name": "chat_old", "content": "chat old result"},
    "audio": {
        "role": "assistant",
        "content": None,
        "audio": {"id": "chat-audio", "data": BYTES, "transcript": "chat transcript", "expires_at": 7},
    },
    "annotations": {
        "role": "assistant",
        "content": "chat annotated",
        "annotations": [
            {"type": "url_citation", "url_citation": {"url": "https://chat.example/c", "title": "chat title"}}
        ],
    },
    "reasoning": {
        "role": "assistant",
        "content": "chat answer",
        "reasoning_content": "chat reasoning content",
    },
    "reasoning of a router": {
        "role": "assistant",
        "content": "router answer",
        "reasoning": "router reasoning",
        "reasoning_details": [
            {"type": "reasoning.text", "text": "router detail", "signature": "router signature"},
            {"type": "reasoning.summary", "summary": "router summary"},
            {"type": "reasoning.encrypted", "data": "router-encrypted"},
        ],
    },
    "unknown": {"role": "assistant", "surprise": {"deep": ["chat surprise"]}},
}

ANTHROPIC: Final[Shapes] = {
    "thinking and calls": {
        "role": "assistant",
        "id": "anthropic-message",
        "model": "anthropic-model",
        "content": [
            {"type": "thinking", "thinking": "anthropic thinking", "signature": "anthropic signature"},
            {"type": "redacted_thinking", "data": "anthropic-redacted"},
            {
                "type": "text",
                "text": "anthropic text",
                "citations": [{"type": "char_location", "cited_text": "anthropic cited"}],
            },
            {
                "type": "tool_use",
                "id": "anthropic-call",
                "name": "anthropic_find",
                "input": {"q": "anthropic q"},
            },
            {
                "type": "server_tool_use",
                "id": "anthropic-server",
                "name": "anthropic_search",
                "input": {"query": "anthropic query"},
            },
            {
                "type": "web_search_tool_result",
                "tool_use_id": "anthropic-server",
                "content": [
                    {
                        "type": "web_search_result",
                        "url": "https://anthropic.example",
                        "title": "anthropic title",
                        "encrypted_content": "anthropic-encrypted",
                    }
                ],
            },
            {
                "type": "mcp_tool_use",
                "id": "anthropic-mcp",
                "name": "anthropic_echo",
                "server_name": "anthropic server",
                "input": {"p": "anthropic p"},
            },
        ],
        "stop_reason": "anthropic_stop",
    },
    "results": {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "anthropic-call",
                "is_error": True,
                "content": [
                    {"type": "text", "text": "anthropic result"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "anthropic/png", "data": BYTES},
                    },
                ],
            },
            {"type": "mcp_tool_result", "tool_use_id": "anthropic-mcp", "content": "anthropic mcp result"},
            {"type": "text", "text": "anthropic after results"},
        ],
    },
    "documents": {
        "role": "user",
        "content": [
            {
                "type": "document",
                "title": "anthropic.txt",
                "source": {"type": "text", "media_type": "text/anthropic", "data": "anthropic plain text"},
            },
            {
                "type": "document",
                "context": "anthropic context",
                "source": {"type": "base64", "media_type": "anthropic/pdf", "data": BYTES},
            },
            {"type": "document", "source": {"type": "url", "url": "https://anthropic.example/d.pdf"}},
            {
                "type": "document",
                "source": {"type": "content", "content": [{"type": "text", "text": "anthropic chunk"}]},
            },
            {
                "type": "search_result",
                "source": "anthropic source",
                "content": [{"type": "text", "text": "anthropic found"}],
            },
            {"type": "container_upload", "file_id": "anthropic-upload"},
        ],
    },
}

GEMINI: Final[Shapes] = {
    "parts": {
        "role": "model",
        "parts": [
            {"text": "gemini thought", "thought": True, "thoughtSignature": "gemini-signature"},
            {"text": "gemini text"},
            {"functionCall": {"id": "gemini-call", "name": "gemini_find", "args": {"q": "gemini argument"}}},
            {"functionCall": {"name": "gemini_again", "args": {"q": "gemini other argument"}}},
            {"inlineData": {"mimeType": "gemini/png", "data": BYTES}},
            {"executableCode": {"language": "GEMINI_PYTHON", "code": "gemini code"}},
            {"codeExecutionResult": {"outcome": "GEMINI_OK", "output": "gemini output"}},
        ],
    },
    "responses": {
        "role": "user",
        "parts": [
            {
                "functionResponse": {
                    "id": "gemini-call",
                    "name": "gemini_find",
                    "response": {"result": "gemini result"},
                }
            },
            {"functionResponse": {"name": "gemini_again", "response": {"error": "gemini error"}}},
            {"fileData": {"mimeType": "gemini/pdf", "fileUri": "gs://gemini/file"}},
            {
                "videoMetadata": {"startOffset": "gemini-offset"},
                "inlineData": {"mimeType": "g/v", "data": BYTES},
            },
        ],
    },
}

BEDROCK: Final[Shapes] = {
    "answer": {
        "role": "assistant",
        "content": [
            {
                "reasoningContent": {
                    "reasoningText": {"text": "bedrock reasoning", "signature": "bedrock-sig"}
                }
            },
            {"reasoningContent": {"redactedContent": "bedrock-redacted"}},
            {"text": "bedrock text"},
            {
                "toolUse": {
                    "toolUseId": "bedrock-call",
                    "name": "bedrock_find",
                    "input": {"q": "bedrock input"},
                }
            },
            {
                "citationsContent": {
                    "content": [{"text": "bedrock cited text"}],
                    "citations": [{"title": "bedrock citation"}],
                }
            },
        ],
    },
    "result": {
        "role": "user",
        "content": [
            {
                "toolResult": {
                    "toolUseId": "bedrock-call",
                    "status": "error",
                    "content": [
                        {"text": "bedrock result"},
                        {"json": {"a": "bedrock json"}},
                        {"image": {"format": "bedrock-png", "source": {"bytes": BYTES}}},
                    ],
                }
            },
            {"document": {"format": "bedrock-pdf", "name": "bedrock document", "source": {"bytes": BYTES}}},
            {"video": {"format": "bedrock-mp4", "source": {"s3Location": {"uri": "s3://bedrock/video"}}}},
            {"guardContent": {"text": {"text": "bedrock guarded", "qualifiers": ["bedrock-qualifier"]}}},
            {"cachePoint": {"type": "default"}},
        ],
    },
}

COHERE: Final[Shapes] = {
    "plan": {
        "role": "assistant",
        "tool_plan": "cohere plan",
        "tool_calls": [
            {
                "id": "cohere-call",
                "type": "function",
                "function": {"name": "cohere_find", "arguments": '{"q": "cohere argument"}'},
            }
        ],
    },
    "documents": {
        "role": "tool",
        "tool_call_id": "cohere-call",
        "content": [
            {"type": "document", "document": {"id": "cohere-document", "data": "cohere data"}},
            {"type": "document", "document": {"data": {"title": "cohere nested"}}},
        ],
    },
    "citations": {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "cohere thinking"},
            {"type": "text", "text": "cohere text"},
        ],
        "citations": [{"text": "cohere citation", "sources": [{"id": "cohere-source"}]}],
    },
}

OWN: Final[Shapes] = {
    **{f"OpenAI chat, {name}": shape for name, shape in OPENAI_CHAT.items()},
    **{f"Anthropic, {name}": shape for name, shape in ANTHROPIC.items()},
    **{f"Gemini, {name}": shape for name, shape in GEMINI.items()},
    **{f"Bedrock, {name}": shape for name, shape in BEDROCK.items()},
    **{f"Cohere, {name}": shape for name, shape in COHERE.items()},
}
"""Messages of providers, which an application keeps in the store itself."""

OPENAI_AGENTS: Final[Shapes] = {
    "message": {
        "type": "message",
        "id": "responses-message",
        "role": "assistant",
        "status": "responses-completed",
        "content": [
            {
                "type": "output_text",
                "text": "responses text",
                "annotations": [{"type": "file_citation", "filename": "responses.txt"}],
                "logprobs": [],
            },
            {"type": "refusal", "refusal": "responses refusal"},
        ],
    },
    "input": {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "responses input"},
            {"type": "input_image", "image_url": PNG, "detail": "responses-auto"},
            {"type": "input_file", "filename": "responses.pdf", "file_data": PNG},
        ],
    },
    "reasoning": {
        "type": "reasoning",
        "id": "responses-reasoning",
        "summary": [{"type": "summary_text", "text": "responses summary"}],
        "content": [{"type": "reasoning_text", "text": "responses reasoned"}],
        "encrypted_content": "responses-encrypted",
    },
    "call": {
        "type": "function_call",
        "id": "responses-item",
        "call_id": "responses-call",
        "name": "responses_find",
        "arguments": '{"q": "responses argument"}',
        "status": "responses-done",
    },
    "output": {"type": "function_call_output", "call_id": "responses-call", "output": "responses output"},
    "output in parts": {
        "type": "function_call_output",
        "call_id": "responses-other",
        "output": [
            {"type": "input_text", "text": "responses output part"},
            {"type": "input_image", "image_url": PNG},
        ],
    },
    "custom call": {
        "type": "custom_tool_call",
        "call_id": "responses-custom",
        "name": "responses_custom",
        "input": "responses custom input",
    },
    "custom output": {
        "type": "custom_tool_call_output",
        "call_id": "responses-custom",
        "output": "responses custom output",
    },
    "web search": {
        "type": "web_search_call",
        "id": "responses-web",
        "status": "responses-web-status",
        "action": {"type": "search", "query": "responses web query"},
    },
    "file search": {
        "type": "file_search_call",
        "id": "responses-files",
        "queries": ["responses file query"],
        "results": [{"text": "responses file result"}],
    },
    "code": {
        "type": "code_interpreter_call",
        "id": "responses-code",
        "code": "responses code",
        "outputs": [{"type": "logs", "logs": "responses logs"}],
    },
    "computer": {
        "type": "computer_call",
        "id": "responses-computer",
        "call_id": "responses-click",
        "action": {"type": "click", "button": "responses-left"},
        "pending_safety_checks": [{"id": "s", "message": "responses safety check"}],
    },
    "screenshot": {
        "type": "computer_call_output",
        "call_id": "responses-click",
        "output": {"type": "computer_screenshot", "image_url": PNG},
    },
    "image": {"type": "image_generation_call", "id": "responses-image", "result": BYTES},
    "shell": {
        "type": "local_shell_call",
        "call_id": "responses-shell",
        "action": {"type": "exec", "command": ["responses-command"]},
    },
    "MCP call": {
        "type": "mcp_call",
        "id": "responses-mcp",
        "name": "responses_mcp",
        "server_label": "responses server",
        "arguments": '{"q": "responses mcp argument"}',
        "output": "responses mcp output",
        "error": "responses mcp error",
    },
    "MCP tools": {"type": "mcp_list_tools", "id": "responses-tools", "tools": [{"name": "responses_listed"}]},
    "compaction": {
        "type": "compaction",
        "id": "responses-compaction",
        "encrypted_content": "responses-compact",
    },
}

CLAUDE_AGENT: Final[Shapes] = {
    "assistant": {
        "type": "assistant",
        "uuid": "claude-uuid",
        "parentUuid": "claude-parent",
        "cwd": "/claude/directory",
        "timestamp": "2026-11-20T10:00:00.123Z",
        "message": {
            "role": "assistant",
            "id": "claude-message",
            "model": "claude-model",
            "content": [
                {"type": "text", "text": "claude text"},
                {
                    "type": "tool_use",
                    "id": "claude-call",
                    "name": "ClaudeRead",
                    "input": {"path": "claude path"},
                },
            ],
            "usage": {"service_tier": "claude-tier"},
        },
    },
    "result": {
        "type": "user",
        "uuid": "claude-uuid-2",
        "toolUseResult": {"stdout": "claude stdout"},
        "message": {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "claude-call", "content": "claude result"}],
        },
    },
    "summary": {"type": "summary", "summary": "claude summary", "leafUuid": "claude-leaf"},
    "system": {"type": "system", "content": "claude system", "subtype": "claude-subtype"},
    "snapshot": {"type": "file-history-snapshot", "snapshot": {"file": "claude snapshot"}},
}

PYDANTIC_AI: Final[Shapes] = {
    "request": {
        "kind": "request",
        "instructions": "pydantic instructions",
        "run_id": "pydantic-run",
        "parts": [
            {"part_kind": "system-prompt", "content": "pydantic system", "dynamic_ref": "pydantic-ref"},
            {"part_kind": "user-prompt", "content": "pydantic prompt", "timestamp": "pydantic-time"},
            {
                "part_kind": "user-prompt",
                "content": [
                    "pydantic list text",
                    {
                        "kind": "image-url",
                        "url": "https://pydantic.example/a.png",
                        "identifier": "pydantic-id",
                    },
                    {"kind": "binary", "data": BYTES, "media_type": "pydantic/pdf"},
                ],
            },
        ],
    },
    "response": {
        "kind": "response",
        "model_name": "pydantic-model",
        "provider_details": {"finish_reason": "pydantic-stop"},
        "parts": [
            {"part_kind": "thinking", "content": "pydantic thinking", "signature": "pydantic-signature"},
            {"part_kind": "text", "content": "pydantic text"},
            {
                "part_kind": "tool-call",
                "tool_name": "pydantic_find",
                "args": '{"q": "pydantic argument"}',
                "tool_call_id": "pydantic-call",
            },
            {
                "part_kind": "builtin-tool-call",
                "tool_name": "pydantic_builtin",
                "args": {"q": "pydantic builtin argument"},
                "tool_call_id": "pydantic-builtin-call",
                "provider_name": "pydantic-provider",
            },
            {
                "part_kind": "builtin-tool-return",
                "tool_name": "pydantic_builtin",
                "content": {"found": "pydantic builtin result"},
                "tool_call_id": "pydantic-builtin-call",
            },
            {"part_kind": "file", "content": {"kind": "binary", "data": BYTES, "media_type": "pydantic/png"}},
        ],
    },
    "returns": {
        "kind": "request",
        "parts": [
            {
                "part_kind": "tool-return",
                "tool_name": "pydantic_find",
                "content": [
                    "pydantic result",
                    {"kind": "image-url", "url": "https://pydantic.example/b.png"},
                ],
                "tool_call_id": "pydantic-call",
                "metadata": {"m": "pydantic metadata"},
            },
            {
                "part_kind": "retry-prompt",
                "tool_name": "pydantic_retry",
                "tool_call_id": "pydantic-retry-call",
                "content": [{"type": "missing", "loc": ["pydantic-loc"], "msg": "pydantic details"}],
            },
        ],
    },
    "unknown part": {
        "kind": "response",
        "parts": [{"part_kind": "compaction", "content": "pydantic compact"}],
    },
}

STRANDS: Final[Shapes] = {
    "message": {
        "message_id": 0,
        "created_at": "strands-time",
        "message": {
            "role": "assistant",
            "metadata": {"model": "strands-model"},
            "content": [
                {"text": "strands text"},
                {
                    "reasoningContent": {
                        "reasoningText": {"text": "strands thinking", "signature": "strands-sig"}
                    }
                },
                {
                    "toolUse": {
                        "toolUseId": "strands-call",
                        "name": "strands_find",
                        "input": {"q": "strands q"},
                    }
                },
            ],
        },
    },
    "result": {
        "message_id": 1,
        "message": {
            "role": "user",
            "content": [
                {
                    "toolResult": {
                        "toolUseId": "strands-call",
                        "status": "success",
                        "content": [{"text": "strands result"}, {"json": {"a": "strands json"}}],
                    }
                },
                {
                    "image": {
                        "format": "strands-png",
                        "source": {"bytes": {"__bytes_encoded__": True, "data": BYTES}},
                    }
                },
                {
                    "document": {
                        "name": "strands document",
                        "format": "pdf-of-strands",
                        "source": {"location": {"type": "s3", "uri": "s3://strands/d"}},
                    }
                },
            ],
        },
    },
}

GOOGLE_ADK: Final[Shapes] = {
    "event": {
        "id": "adk-event",
        "invocation_id": "adk-invocation",
        "author": "adk-agent",
        "timestamp": 1_700_000_000.5,
        "actions": {"state_delta": {"k": "adk delta"}, "transfer_to_agent": "adk-other-agent"},
        "usage_metadata": {"traffic_type": "adk-traffic"},
        "content": {
            "role": "model",
            "parts": [
                {"text": "adk thought", "thought": True, "thought_signature": "adk-signature"},
                {"text": "adk text"},
                {"function_call": {"id": "adk-call", "name": "adk_find", "args": {"q": "adk argument"}}},
                {"executable_code": {"code": "adk code", "language": "ADK_PYTHON"}},
            ],
        },
    },
    "response": {
        "author": "adk-answerer",
        "content": {
            "role": "user",
            "parts": [
                {
                    "function_response": {
                        "id": "adk-call",
                        "name": "adk_find",
                        "response": {"result": "adk result"},
                    }
                },
                {"inline_data": {"data": BYTES, "mime_type": "adk/png", "display_name": "adk.png"}},
                {"file_data": {"file_uri": "gs://adk/map", "mime_type": "adk/pdf"}},
            ],
        },
    },
    "error": {"author": "adk-failing", "error_code": "ADK_CODE", "error_message": "adk error message"},
}

AGENT_FRAMEWORK: Final[Shapes] = {
    "message": {
        "type": "chat_message",
        "role": "assistant",
        "author_name": "af-author",
        "message_id": "af-message",
        "additional_properties": {"p": "af property"},
        "contents": [
            {"type": "text_reasoning", "text": "af reasoning", "protected_data": "af-protected"},
            {"type": "text", "text": "af text", "annotations": [{"title": "af annotation"}]},
            {
                "type": "function_call",
                "call_id": "af-call",
                "name": "af_find",
                "arguments": '{"q": "af argument"}',
            },
            {"type": "usage", "usage_details": {"kind_of": "af usage"}},
            {"type": "error", "message": "af error", "error_code": "af-code", "details": "af details"},
        ],
    },
    "result": {
        "type": "message",
        "role": "tool",
        "contents": [
            {
                "type": "function_result",
                "call_id": "af-call",
                "result": "af result",
                "exception": "af exception",
            },
            {"type": "data", "uri": PNG, "media_type": "af/png"},
            {"type": "uri", "uri": "https://af.example/map.png", "media_type": "af/map"},
            {"type": "hosted_file", "file_id": "af-file"},
            {"type": "hosted_vector_store", "vector_store_id": "af-vectors"},
            {
                "type": "function_approval_request",
                "id": "af-approval",
                "function_call": {"call_id": "af-asked", "name": "af_ask", "arguments": "{}"},
            },
            {"type": "mcp_server_tool_result", "call_id": "af-mcp", "output": "af mcp output"},
        ],
    },
}

LANGCHAIN: Final[Shapes] = {
    "human": {
        "type": "human",
        "id": "lc-human",
        "name": "lc-name",
        "content": [
            {"type": "text", "text": "lc text"},
            {"type": "image", "base64": BYTES, "mime_type": "lc/png"},
            {"type": "image_url", "image_url": {"url": "https://lc.example/a.png"}},
            {"type": "text-plain", "text": "lc plain", "mime_type": "text/lc"},
            {"type": "file", "file_id": "lc-file", "title": "lc title"},
        ],
    },
    "ai v0": {
        "type": "ai",
        "content": "lc answer",
        "additional_kwargs": {"refusal": "lc refusal", "reasoning_content": "lc reasoning content"},
        "response_metadata": {"model_name": "lc-model"},
        "tool_calls": [
            {"type": "tool_call", "id": "lc-call", "name": "lc_find", "args": {"q": "lc argument"}}
        ],
        "invalid_tool_calls": [
            {
                "type": "invalid_tool_call",
                "id": "lc-invalid",
                "name": "lc_broken",
                "args": "lc broken arguments",
                "error": "lc parse error",
            }
        ],
    },
    "ai v1": {
        "type": "ai",
        "content": [
            {"type": "reasoning", "reasoning": "lc v1 reasoning", "extras": {"signature": "lc-v1-signature"}},
            {
                "type": "text",
                "text": "lc v1 text",
                "annotations": [
                    {"type": "citation", "url": "https://lc.example/c", "cited_text": "lc cited"}
                ],
            },
            {"type": "tool_call", "id": "lc-v1-call", "name": "lc_v1_find", "args": {"q": "lc v1 argument"}},
            {
                "type": "server_tool_call",
                "id": "lc-server",
                "name": "lc_server",
                "args": {"q": "lc server q"},
            },
            {"type": "server_tool_result", "tool_call_id": "lc-server", "output": "lc server output"},
            {"type": "non_standard", "value": {"x": "lc non standard"}},
        ],
        "tool_calls": [
            {"type": "tool_call", "id": "lc-v1-call", "name": "lc_v1_find", "args": {"q": "lc v1 argument"}}
        ],
    },
    "ai of Anthropic": {
        "type": "ai",
        "content": [
            {"type": "thinking", "thinking": "lc thinking", "signature": "lc-signature"},
            {
                "type": "tool_use",
                "id": "lc-streamed",
                "name": "lc_stream",
                "input": {},
                "partial_json": "lc json",
            },
        ],
        "tool_calls": [
            {"type": "tool_call", "id": "lc-streamed", "name": "lc_stream", "args": {"q": "lc streamed"}}
        ],
    },
    "tool": {
        "type": "tool",
        "tool_call_id": "lc-call",
        "name": "lc_find",
        "content": "lc result",
        "artifact": {"raw": "lc artifact"},
        "status": "error",
    },
    "system": {"type": "system", "content": "lc system"},
}

SHAPES: Final[dict[str, Shapes]] = {
    "": OWN,
    "OpenAI Agents SDK": OPENAI_AGENTS,
    "Claude Agent SDK": CLAUDE_AGENT,
    "Pydantic AI": PYDANTIC_AI,
    "Strands Agents": STRANDS,
    "Google ADK": GOOGLE_ADK,
    "Microsoft Agent Framework": AGENT_FRAMEWORK,
    "LangGraph": LANGCHAIN,
}
"""The shapes by the name of the conversation that shows them; the store's own has no name."""
