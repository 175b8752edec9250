"""Text from a checkpoint: the same tokens as a full forward, on any ranks, at a constant cost."""

import pytest
from training_runs import RUN, train

from megatron_longseq.errors import UserError
from megatron_longseq.generation import Request

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --max-position-embeddings 64 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 80 "
    "--longseq-linear-attention"
).split()
GDN = [*MODEL, "gdn", "--position-embedding-type", "none"]
RETENTION = [*MODEL, "retention", "--position-embedding-type", "rope"]
LEARNED = [*MODEL, "lightning", "--position-embedding-type", "learned_absolute"]
SOFTMAX = [*MODEL, *"gdn --position-embedding-type rope --linear-attention-freq 2".split()]
PROMPT = "def dumps(obj, *, skipkeys=False, ensure_ascii=True):"


def generated(request, ranks):
    """The text, and every rank's logits along it beside those of one full forward."""
    import torch
    import torch.distributed as dist

    from megatron_longseq import generation

    seen, read = [], generation.Decoder.read

    def watched(decoder, tokens):
        logits = read(decoder, tokens)
        seen.append((list(tokens), logits))
        return logits

    generation.Decoder.read = watched
    text = generation.generate(request, ranks)
    tokens = [token for part, _ in seen for token in part]
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    saved = generation._saved(request)
    model, _ = generation._build(saved, 1)
    generation._load(model, generation._folder(request))
    with torch.no_grad():
        ids = torch.tensor([tokens])
        whole = model(ids, torch.arange(len(tokens))[None], None)[0]
    steps = torch.stack([logits for _, logits in seen])
    expected = whole[len(seen[0][0]) - 1 :]
    error = (steps - expected).abs().max() / expected.abs().max()
    texts = [None] * ranks
    dist.all_gather_object(texts, text)
    return text, texts, error.item(), [len(part) for part, _ in seen]


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        pytest.param(GDN, 2, id="convolution"),
        pytest.param(RETENTION, 2, id="rotary positions", marks=pytest.mark.thorough),
    ],
)
def test_steps_from_a_state_equal_a_full_forward(model, ranks, megatron_ranks, tmp_path, corpus):
    train(
        megatron_ranks,
        tmp_path,
        f"--save {tmp_path / 'c'} --save-interval 2 --context-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--longseq-keep-attention-output",
        processes=2,
        steps=2,
        data=corpus,
        model=model,
    )
    request = Request(str(tmp_path / "c"), PROMPT, tokens=6, temperature=0)
    answers = [
        found
        for count in (1, ranks)
        for found in megatron_ranks.run(
            generated, world_size=count, args=(request, count), backend="gloo"
        )
    ]
    assert len({text for text, *_ in answers}) == 1
    for text, texts, error, lengths in answers:
        assert set(texts) == {text}
        assert error < 1e-5
        # The prompt, then one token at a time.
        assert lengths == [len(PROMPT)] + [1] * 5


def refusal(request):
    from megatron_longseq import generation

    try:
        generation.generate(request, 1)
    except UserError as error:
        return str(error)
    return "accepted"


def test_what_it_cannot_do_is_refused_by_name(megatron_ranks, tmp_path, corpus):
    for name, model in (("softmax", SOFTMAX), ("learned", LEARNED)):
        train(
            megatron_ranks,
            tmp_path / name,
            f"--save {tmp_path / name} --save-interval 1",
            steps=1,
            data=corpus,
            model=model,
        )

    def answer(folder, **options):
        request = Request(str(tmp_path / folder), PROMPT, **options)
        return megatron_ranks.run(refusal, world_size=1, args=(request,), backend="gloo")[0]

    assert "layers of softmax attention (--linear-attention-freq 2)" in answer("softmax")
    assert "learned positions; use at most 11" in answer("learned", tokens=12)
    assert "no checkpoint" in answer("nowhere")
    assert "--temperature -1" in answer("learned", temperature=-1)
    assert "--temperature 1e-320" in answer("learned", temperature=1e-320)
    assert "--step 7: --load" in answer("learned", step=7)
    assert "--top-k 0" in answer("learned", top_k=0)
    assert answer("learned", tokens=3, top_k=2) == "accepted"
    assert len(PROMPT) == 53 and "--seq-length" in RUN
