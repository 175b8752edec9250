"""docs/gpu-only.md names every function with a line that only a GPU can run."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_longseq"
PAGE = ROOT / "docs" / "gpu-only.md"
# These talk about GPUs for a living: the CPU's answers for them, the report, and the check itself.
ABOUT_GPUS = ("cpu_platform/", "environment/", "cli/doctor.py", "gpu_check/")
OPERATORS = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn)_attention(_backward)?$")


def is_for_gpus(node):
    """Whether this expression makes sense on a GPU alone."""
    match node:
        case ast.Attribute(attr="is_cuda"):
            return True
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
            return True
        case ast.Call(func=ast.Attribute(attr="cuda")):
            return True
        case ast.Attribute(attr=name) if OPERATORS.match(name):
            return True
        case ast.keyword(arg="pin_memory"):
            return True
        case ast.Compare():
            return any(is_constant(side, "cuda") for side in (node.left, *node.comparators))
        case ast.Call(func=ast.Attribute(attr="device"), args=[first, *_]):
            return is_constant(first, "cuda")
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[first, *_]):
            return isinstance(first, ast.Constant) and str(first.value).startswith("flash_attn")
    return False


def is_constant(node, value):
    return isinstance(node, ast.Constant) and node.value == value


def functions_for_gpus(text):
    """Names of the functions, ``Class.method`` or ``function``, that hold such an expression."""
    found = set()

    def visit(node, outer, inner):
        if isinstance(node, ast.ClassDef):
            outer = node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and inner is None:
            inner = f"{outer}.{node.name}" if outer else node.name
        if is_for_gpus(node):
            found.add(inner or "module")
        for child in ast.iter_child_nodes(node):
            visit(child, outer, inner)

    visit(ast.parse(text), "", None)
    return found


def all_functions(text):
    tree = ast.parse(text)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return names


def named_on_the_page():
    """``{file: {functions}}`` of the first column of the page's tables."""
    named = {}
    for line in PAGE.read_text().splitlines():
        cell = line.split("|")[1] if line.startswith("| `") else ""
        words = re.findall(r"`([^`]+)`", cell)
        if words:
            named.setdefault(words[0], set()).update(words[1:])
    return named


def sources():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(ABOUT_GPUS):
            yield name, path.read_text()


def test_every_line_for_gpus_is_on_the_page():
    named = named_on_the_page()
    missing = {
        name: sorted(functions)
        for name, text in sources()
        if (functions := functions_for_gpus(text) - named.get(name, set()))
    }
    assert missing == {}, f"{PAGE.name} must name these functions in its first column: {missing}"


def test_the_page_names_no_function_that_is_gone():
    texts = dict(sources())
    gone = {
        name: sorted(functions - all_functions(texts.get(name, "")))
        for name, functions in named_on_the_page().items()
        if not functions <= all_functions(texts.get(name, ""))
    }
    assert gone == {}


@pytest.mark.parametrize(
    "line, name",
    [
        ("if query.is_cuda: pass", "is_cuda"),
        ("torch.cuda.synchronize()", "torch.cuda"),
        ("batch.cuda(non_blocking=True)", ".cuda()"),
        ("torch.device('cuda', 0)", "a device"),
        ("if device.type != 'cuda': pass", "a comparison"),
        ("torch.empty(3, pin_memory=pinned)", "pinned memory"),
        ("aten._scaled_dot_product_efficient_attention_backward(q)", "an operator"),
        ("importlib.import_module('flash_attn.flash_attn_interface')", "flash-attn"),
    ],
)
def test_such_a_line_is_found(line, name):
    assert functions_for_gpus(f"class A:\n    def f(self):\n        {line}\n") == {"A.f"}, name
    assert functions_for_gpus(line) == {"module"}


def test_a_line_for_every_device_is_not_found():
    text = "def f(q):\n    aten._scaled_dot_product_flash_attention_for_cpu(q)\n    q.to('cpu')\n"
    assert functions_for_gpus(text) == set()
