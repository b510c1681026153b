"""What minigpt promises, each promise checked against something that is not minigpt's code.

    python -m pytest
    MINIGPT_SLOW=1 python -m pytest   # and the full matrix of kills and signals

Eight devices are simulated on the CPU and the models are tiny; no network is used.
"""

import csv
import dataclasses
import json
import logging
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types

# The programs are tiny and compiling them is what takes time: each is compiled once and lightly.
CACHE = tempfile.TemporaryDirectory()
os.environ |= {
    'XLA_FLAGS': '--xla_backend_optimization_level=0',
    'JAX_PLATFORMS': 'cpu',
    'JAX_COMPILATION_CACHE_DIR': CACHE.name,
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
}

import jax

jax.config.update('jax_num_cpu_devices', 8)

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiktoken
from flax import nnx
from jax.sharding import PartitionSpec as P

import minigpt

logging.getLogger('asyncio').setLevel('CRITICAL')  # Orbax's threads tell it of damaged files
SCRIPT = pathlib.Path(minigpt.__file__)
MESHES = ['1,1', '8,1', '4,2', '2,4', '1,8']
VOCAB = 300  # padded to 384
SIZES = {
    'maxlen': 16,
    'embed_dim': 32,
    'num_heads': 8,
    'feed_forward_dim': 32,
    'num_transformer_blocks': 1,
}
TINY = [f'--{name}={value}' for name, value in SIZES.items()]


def tiny_model(mesh='1,1', seed=0, vocab_size=VOCAB, **changes):
    minigpt.create_mesh(mesh)
    config = minigpt.ModelConfig(vocab_size, **SIZES | {'dtype': 'float32'} | changes)
    return minigpt.create_model(config, seed)


def random_ids(shape, vocab_size=VOCAB, seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def logits(model, ids_BT):
    """Logits by whole matrices: (B, T, V), real vocabulary only."""
    x_BTD, _ = minigpt.gather(model)(minigpt.to_devices(ids_BT))
    return np.asarray(x_BTD) @ np.asarray(model.output_layer[...])[:VOCAB].T


def numpy_losses(model, ids_BW, vocab_size=VOCAB):
    """Cross-entropy of each next token, by whole logits in float64: (B, T) nats."""
    z = logits(model, ids_BW[:, :-1])[..., :vocab_size].astype(np.float64)
    right = np.take_along_axis(z, ids_BW[:, 1:, None], axis=-1)[..., 0]
    return np.log(np.exp(z).sum(-1)) - right


def run_steps(mesh, steps=4, batch_size=8, accum_steps=1, **changes):
    """[(loss, grad_norm), ...] and the trained model of a few steps on random windows."""
    model = tiny_model(mesh, **changes)
    optimizer = minigpt.create_optimizer(model, minigpt.learning_rate_schedule(1e-2, 2, steps))
    out = []
    for step in range(steps):
        ids_BW = minigpt.to_devices(random_ids((batch_size, SIZES['maxlen'] + 1), seed=step))
        model, optimizer, metrics = minigpt.train_step(
            model, optimizer, ids_BW, jax.random.key(7), accum_steps
        )
        out.append((float(metrics['loss']), float(metrics['grad_norm'])))
    return np.array(out), model


def fork(*changes):
    """The script with some texts replaced, as a module beside it."""
    source = SCRIPT.read_text()
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    module = types.ModuleType('fork')
    sys.modules['fork'] = module  # dataclasses look their module up
    source = re.sub(r'^flags.DEFINE.*', '', source, flags=re.M)
    exec(compile(source, 'fork', 'exec'), module.__dict__)
    return module


DEFAULTS = {flag.name: flag.default for flag in minigpt.FLAGS.flags_by_module_dict()['minigpt']}


def parse(*arguments):
    """The flags as `main` sees them, nothing left of those parsed before."""
    minigpt.FLAGS.unparse_flags()
    for name, value in DEFAULTS.items():
        minigpt.FLAGS[name].unparse()
        minigpt.FLAGS.set_default(name, value)
    minigpt.FLAGS(['minigpt.py', *arguments])


def train(workdir, *arguments):
    """A run inside this process; returns the rows of its metrics.csv."""
    minigpt.SIGNALS.clear()
    parse(*TINY, f'--workdir={workdir}', '--tokenizer=bytes', '--prompt=the', *arguments)
    minigpt.train()
    return list(csv.DictReader(open(pathlib.Path(workdir).expanduser() / 'metrics.csv')))


def cli(*arguments, cwd=None, **env):
    """The script as a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | env,
    )


def start(*arguments):
    """The script as a process of its own, whose output collects in pipes."""
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(process, happened):
    """Waits for a condition while the process runs; False if it ended without."""
    deadline = time.time() + 300
    while not happened():
        if process.poll() is not None or time.time() > deadline:
            return False
        time.sleep(0.001)
    return True


def write_text(path, stories=60, seed=0):
    """A text of short stories of 13 words."""
    rng = np.random.default_rng(seed)
    words = re.findall(r'\w+', 'the cat sat on a mat and saw one red ball near old trees')
    text = '<|endoftext|>'.join(' '.join(rng.choice(words, 12)) + '.\n' for _ in range(stories))
    path.write_text(text, encoding='utf-8')
    return path


# ---- The model -----------------------------------------------------------------------------------
def numpy_forward(model, ids_T):
    """The whole model for one row, in plain float64 NumPy loops over heads: (T, D)."""

    def get(variable):
        return np.asarray(variable[...], np.float64)

    def norm(layer, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * get(layer.scale) + get(layer.bias)

    T = len(ids_T)
    x = get(model.embedding_layer.token_emb)[ids_T] + get(model.embedding_layer.pos_emb)[:T]
    for block in model.transformer_blocks:
        h = norm(block.norm1, x)
        qkv, out = get(block.qkv), get(block.out)
        for head in range(qkv.shape[2]):
            q, k, v = (h @ qkv[:, i, head] for i in range(3))
            for t in range(T):
                scores = np.array([q[t] @ k[s] for s in range(t + 1)]) / math.sqrt(q.shape[1])
                weights = np.exp(scores) / np.exp(scores).sum()
                x[t] += (weights @ v[: t + 1]) @ out[head]
        x = x + np.maximum(norm(block.norm2, x) @ get(block.up), 0) @ get(block.down)
    return norm(model.norm, x)


def sharpened(model, factor):
    """The model with larger matrices than at the start: attention is then far from uniform."""
    return jax.tree.map(lambda a: a * factor if a.ndim > 1 else a, model)


@pytest.mark.parametrize('mesh', ['1,1', '4,2'])
def test_the_forward_pass_is_that_of_plain_numpy(mesh):
    model = sharpened(tiny_model(mesh, num_transformer_blocks=2), 8)
    ids_BT = random_ids((4, 16))
    x_BTD = np.asarray(minigpt.gather(model)(minigpt.to_devices(ids_BT))[0])
    for row in range(2):
        np.testing.assert_allclose(x_BTD[row], numpy_forward(model, ids_BT[row]), atol=2e-4)


def test_a_later_token_changes_nothing_before_it_and_an_earlier_one_does():
    model = tiny_model()
    ids_BT = random_ids((1, 16))
    changed_BT = ids_BT.copy()
    changed_BT[0, 9] = (changed_BT[0, 9] + 1) % VOCAB
    before, after = logits(model, ids_BT)[0], logits(model, changed_BT)[0]
    np.testing.assert_array_equal(before[:9], after[:9])
    assert (np.abs(before[9:] - after[9:]).max(-1) > 1e-6).all()


def test_attention_weighs_scores_of_any_size():
    """A softmax that takes exp of the scores as they are would overflow."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 1, 5, 4)).astype(np.float32) * 30
    z = np.where(np.tri(5) > 0, q[0, 0] @ k[0, 0].astype(np.float64).T / math.sqrt(4), -np.inf)
    assert z.max() > 89  # exp(89) is above all float32
    weights = np.exp(z - z.max(-1, keepdims=True))
    true = weights @ v[0, 0] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(minigpt.attention(q, k, v)[0, 0], true, rtol=1e-3, atol=1e-3)


def test_parameters_are_float32_and_split_over_the_whole_mesh():
    model = tiny_model('4,2', dtype='bfloat16')
    assert dict(jax.sharding.get_mesh().shape) == {'batch': 4, 'model': 2}

    def part(parameter):
        return parameter[...].addressable_shards[0].data.shape

    assert part(model.output_layer) == (384 // 2, 32 // 4)
    assert part(model.embedding_layer.token_emb) == (384 // 4, 32 // 2)
    block = model.transformer_blocks[0]
    assert part(block.qkv) == (32 // 4, 3, 8 // 2, 4)
    assert part(block.out) == (8 // 2, 4, 32 // 4)
    assert part(block.up) == (32 // 4, 32 // 2)
    assert part(block.down) == (32 // 2, 32 // 4)
    optimizer = minigpt.create_optimizer(model, 1e-3)
    whole = sum(a.size for a in jax.tree.leaves(model))
    held = sum(a.addressable_shards[0].data.size for a in jax.tree.leaves((model, optimizer)))
    assert held < 3 * whole / 8 * 1.2  # parameters and two moments, an eighth on each device
    assert {a.dtype for a in jax.tree.leaves(model)} == {jnp.dtype('float32')}


def test_the_parameters_follow_from_the_seed_alone():
    first, other = tiny_model('1,1'), tiny_model('1,1', seed=1)
    for mesh in MESHES:
        for found, true in zip(
            jax.tree.leaves(tiny_model(mesh)), jax.tree.leaves(first), strict=True
        ):
            np.testing.assert_array_equal(found, true)
    assert not np.array_equal(first.output_layer[...], other.output_layer[...])


def test_matrices_start_normal_with_a_deviation_of_a_fiftieth():
    for a in jax.tree.leaves(tiny_model(embed_dim=128, num_heads=4)):
        if a.ndim > 1:
            assert np.std(a) == pytest.approx(0.02, rel=0.05)
            assert abs(np.mean(a)) < 4 * 0.02 / math.sqrt(a.size)


def test_bfloat16_compute_stays_near_float32():
    exact, _ = run_steps('1,1', steps=2)
    coarse, _ = run_steps('1,1', steps=2, dtype='bfloat16')
    np.testing.assert_allclose(coarse[:, 0], exact[:, 0], atol=0.02)
    assert not np.array_equal(coarse, exact)


NOTEBOOK = """
import minigpt, numpy as np, jax
minigpt.create_mesh('4,2')
config = minigpt.ModelConfig(257, 16, embed_dim=32, num_heads=4, num_transformer_blocks=1)
model, key = minigpt.create_model(config), jax.random.key(0)
optimizer = minigpt.create_optimizer(model, 0.05)
ids_BW = minigpt.to_devices(np.full((8, 17), ord('a')))
for _ in range(3):
    model, optimizer, metrics = minigpt.train_step(model, optimizer, ids_BW, key)
    print(metrics['loss'])
print(*minigpt.generate_text(model, minigpt.load_tokenizer('bytes'), 'a', temperature=0.0))
"""


def test_ten_lines_of_a_notebook_train_and_write_without_any_flag(tmp_path):
    """All windows hold the letter a: three large steps have to be enough to write it."""
    assert len(NOTEBOOK.strip().splitlines()) <= 10
    run = subprocess.run(
        [sys.executable, '-c', NOTEBOOK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {'PYTHONPATH': str(SCRIPT.parent)},
    )
    assert run.returncode == 0, run.stderr
    *losses, text = run.stdout.splitlines()
    first, second, third = map(float, losses)
    assert first == pytest.approx(math.log(257), abs=0.1)
    assert first > second > third
    assert text == 'a' * 15
    assert not list(tmp_path.iterdir())


def test_a_config_is_fixed_and_pads_the_vocabulary_to_128():
    config = minigpt.ModelConfig(50257)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.maxlen = 1
    sizes = [1, 127, 128, 129, 257, 50257]
    padded = [minigpt.ModelConfig(size).padded_vocab_size for size in sizes]
    assert padded == [128, 128, 128, 256, 384, 50304]


def test_what_the_user_can_fix_is_a_value_error_that_functions_raise():
    assert issubclass(minigpt.UserError, ValueError)
    minigpt.create_mesh('1,1')
    tokenizer = minigpt.load_tokenizer('bytes')
    for wrong in [
        lambda: minigpt.create_mesh('3x'),
        lambda: minigpt.create_mesh('3,3'),
        lambda: minigpt.load_tokenizer('nonsense'),
        lambda: minigpt.encode_prompt(tokenizer, 'a' * 16, 16),
        lambda: minigpt.split_windows(np.arange(40), 10, 4),
    ]:
        with pytest.raises(minigpt.UserError):
            wrong()
    assert jax.sharding.get_mesh().size == 1  # the mesh that fits is still there


# ---- Data ----------------------------------------------------------------------------------------
def tokens_of(path, workdir, tokenizer=None):
    ids, digest = minigpt.load_tokens(path, tokenizer or minigpt.load_tokenizer('bytes'), workdir)
    return ids.tolist(), digest


def test_every_grammar_story_has_64_tokens_and_choices_as_likely_as_the_entropy_says(tmp_path):
    path = tmp_path / 'grammar.txt'
    minigpt.write_grammar(path)
    stories = list(minigpt.file_stories(path))
    entropy = 0
    for words in minigpt.CHOICES.values():
        words = words.split()
        counts = np.array(
            [sum(word in re.findall(r'\w+', story) for story in stories) for word in words]
        )
        assert counts.sum() == len(stories)  # one of the words, in each story
        entropy += math.log(len(words))
        assert (np.abs(counts / len(stories) - 1 / len(words)) < 0.03).all()
    assert math.isclose(entropy / 64, minigpt.ENTROPY)
    assert len(set(stories)) == len(stories)

    tokenizer = minigpt.load_tokenizer('words', minigpt.common_words(stories))
    ids, _ = minigpt.load_tokens(path, tokenizer, tmp_path)
    training, held_out = minigpt.split_windows(ids, 64, 4)  # a window is a story between two ends
    assert (len(training), len(held_out)) == (2048, 64)
    is_end = np.concatenate([training, held_out]) == tokenizer.eot_token
    np.testing.assert_array_equal(is_end, [[True, *[False] * 63, True]] * 2112)

    before = path.read_bytes()
    minigpt.write_grammar(path)
    assert path.read_bytes() == before


def test_line_endings_and_byte_order_mark_do_not_change_the_ids(tmp_path):
    plain = b'one\ntwo<|endoftext|>\nthree, na\xc3\xafve\n'
    windows, mac = plain.replace(b'\n', b'\r\n'), plain.replace(b'\n', b'\r')
    found = []
    for i, form in enumerate([plain, windows, mac, b'\xef\xbb\xbf' + plain]):
        (tmp_path / f'{i}.txt').write_bytes(form)
        found.append(tokens_of(tmp_path / f'{i}.txt', tmp_path)[0])
    end = 256
    assert found[0] == [end, *b'one\ntwo', end, *'three, naïve'.encode(), end]
    assert found[1:] == found[:1] * 3


def test_the_token_file_is_named_by_the_content_of_the_text_and_made_once(tmp_path):
    path = write_text(tmp_path / 'my text.txt')
    ids, digest = tokens_of(path, tmp_path)
    (made,) = tmp_path.glob('*.tokens')
    assert re.fullmatch(rf'my text\.bytes\..*{digest}.*\.tokens', made.name)
    stamp = made.stat().st_mtime_ns
    os.utime(path, (0, 0))  # the same text with another date
    assert tokens_of(path, tmp_path) == (ids, digest)
    assert made.stat().st_mtime_ns == stamp
    size = path.stat().st_size
    path.write_text('x' * (size - 1) + 'y')  # another text with the same size and date
    os.utime(path, (0, 0))
    found, changed_digest = tokens_of(path, tmp_path)
    assert found == [256, *b'x' * (size - 1), ord('y'), 256]
    assert changed_digest != digest
    assert tokens_of(write_text(path), tmp_path) == (ids, digest)


def test_an_interrupted_token_file_is_not_there_and_made_anew(tmp_path, monkeypatch):
    path = write_text(tmp_path / 'text.txt', stories=2000)  # more than one batch of 512
    tokenizer = minigpt.load_tokenizer('bytes')
    encode, calls = tokenizer.encode_ordinary_batch, []

    def interrupted(stories):
        calls.append(stories)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(stories)

    monkeypatch.setattr(tokenizer, 'encode_ordinary_batch', interrupted)
    with pytest.raises(KeyboardInterrupt):
        minigpt.load_tokens(path, tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    ids, _ = tokens_of(path, tmp_path)
    assert bytes(i for i in ids if i < 256) == b''.join(
        story.strip().encode() for story in path.read_text().split('<|endoftext|>')
    )
    assert ids.count(256) == 2001


@pytest.mark.parametrize('block', [1, 5, 64])
def test_stories_are_those_between_the_end_marks_wherever_a_block_of_the_file_ends(block, tmp_path):
    stories = [
        'a',
        'b <|endof',
        'text|> c\n\nd',
        'word ' * 30,
        'naïve 🙂',
        '',
        ' \n',
        '<|fim_prefix|>',
    ]
    text = '<|endoftext|>'.join(stories)
    (tmp_path / 'a.txt').write_text(text, encoding='utf-8')
    (tmp_path / 'b.txt').write_text(text + '<|endoftext|>\n', encoding='utf-8')
    true = [story.strip() for story in text.split('<|endoftext|>') if story.strip()]
    reader = fork(('2**24', str(block)))
    assert list(reader.file_stories(tmp_path / 'a.txt')) == true
    assert list(reader.file_stories(tmp_path / 'b.txt')) == true


@pytest.mark.parametrize('name', ['bytes', 'words'])
def test_special_texts_and_rare_characters_keep_every_byte(name, tmp_path):
    stories = [
        'x' * 2000 + ' <|endofprompt|> <|fim_prefix|>',
        'tab\t  two\n\n_9 naïve',
        'last 🙂 字',
    ]
    (tmp_path / 'a.txt').write_text('<|endoftext|>'.join(stories), encoding='utf-8')
    words = minigpt.common_words(stories) if name == 'words' else []
    tokenizer = minigpt.load_tokenizer(name, words)
    ids, _ = tokens_of(tmp_path / 'a.txt', tmp_path, tokenizer)
    vocabulary = [bytes([i]) for i in range(256)] + [word.encode() for word in words]
    found = b''.join([*vocabulary, b'\xff'][i] for i in ids)  # \xff: no UTF-8 text holds it
    assert found == b'\xff' + b''.join(story.encode() + b'\xff' for story in stories)


def test_the_words_are_the_most_frequent_of_the_text():
    words = minigpt.common_words(['the cat saw the cat, the dog saw', 'a the dog'])
    assert (words[0], words[-1]) == (' the', 'the')  # 3 times and once
    assert set(words[1:-1]) == {' cat', ' saw', ' dog'}  # twice; one character is no word
    stories = ['x' + chr(0x4E00 + i) for i in range(9990)]  # as many words, each with a letter
    words = minigpt.common_words(
        [*stories, *['often'] * 10, *['late'] * 20]
    )  # 10,000 stories are read
    assert len(words) == len(set(words)) == 4096
    assert words[0] == 'often'
    assert 'late' not in words


def test_windows_cover_the_stream_once_and_held_out_ones_never_train():
    ids = np.arange(1001, dtype=np.uint16)
    training, held_out = minigpt.split_windows(ids, 10, 4)
    assert (len(training), len(held_out)) == (90, 10)
    for i, window in enumerate(np.concatenate([training, held_out])):
        np.testing.assert_array_equal(window, np.arange(10 * i, 10 * i + 11))
    seen = np.concatenate(list(minigpt.training_batches(training, 9, 0)[:30]))
    assert len(seen) == 270
    assert seen[:, 1:].max() <= 900
    np.testing.assert_array_equal(np.unique(seen[:90, 0]), np.arange(0, 900, 10))  # each once
    _, held_out = minigpt.split_windows(np.arange(10001), 10, 4)
    np.testing.assert_array_equal(held_out[:, 0], np.arange(9360, 10000, 10))  # 64 at most


def test_the_order_of_batches_follows_from_seed_and_step_alone():
    training, _ = minigpt.split_windows(np.arange(2001, dtype=np.uint16), 10, 4)

    def batches(seed, start, stop):
        return list(minigpt.training_batches(training, 7, seed)[start:stop])

    whole = batches(3, 0, 60)
    np.testing.assert_array_equal(whole[:40], batches(3, 0, 40))
    np.testing.assert_array_equal(whole[31:], batches(3, 31, 60))  # from the middle
    assert not np.array_equal(whole, batches(4, 0, 60))
    epochs = np.concatenate(whole)[:, 0]
    assert not np.array_equal(epochs[:180], epochs[180:360])  # shuffled anew each epoch
    last_steps = minigpt.training_batches(training[:1], 1, 2**32 - 1)[2**31 - 4 : 2**31 - 1]
    np.testing.assert_array_equal(list(last_steps), [training[:1]] * 3)


# ---- The train step ------------------------------------------------------------------------------
@pytest.mark.parametrize('mesh', MESHES)
def test_fused_loss_and_gradients_are_those_of_optax_on_whole_logits(mesh, monkeypatch):
    monkeypatch.setattr(minigpt, 'CHUNK', 7)  # of 12 or more tokens of a device: several chunks
    minigpt.create_mesh(mesh)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 12, 32)).astype(np.float32)
    w = rng.normal(size=(384, 32)).astype(np.float32)
    y = random_ids((8, 12))

    def whole(x, w):
        return 3 * optax.softmax_cross_entropy_with_integer_labels(x @ w[:VOCAB].T, y).mean()

    x_BTD, y_BT = jax.device_put(x, P('batch', None, None)), jax.device_put(y, P('batch', None))
    w_VD = jax.device_put(w, P('model', None))

    def fused(x_BTD, w_VD):
        return 3 * minigpt.cross_entropy(x_BTD, w_VD, y_BT, VOCAB) / y.size

    loss, grads = jax.jit(jax.value_and_grad(fused, argnums=(0, 1)))(x_BTD, w_VD)
    true_loss, true_grads = jax.value_and_grad(whole, argnums=(0, 1))(
        jnp.asarray(x), jnp.asarray(w)
    )
    np.testing.assert_allclose(loss, true_loss, rtol=1e-6)
    for found, true in zip(grads, true_grads, strict=True):
        np.testing.assert_allclose(found, true, atol=1e-6)
    assert not np.asarray(grads[1])[VOCAB:].any()  # padded rows learn nothing


def test_the_loss_of_large_logits_is_finite_and_exact():
    minigpt.create_mesh('1,8')
    x_BTD = np.full((1, 1, 1), 1000, np.float32)
    w_VD = np.zeros((384, 1), np.float32)
    w_VD[200] = 1  # the logit of id 200 is 1000, those of the other ids are 0
    x_BTD, w_VD = jax.device_put((x_BTD, w_VD), (P('batch', None, None), P('model', None)))
    losses, *_ = minigpt.token_losses(x_BTD, w_VD, minigpt.to_devices([[5]]), VOCAB)
    np.testing.assert_allclose(losses, [[1000]])


def test_loss_is_the_numpy_cross_entropy_of_each_next_token():
    model = tiny_model()
    ids_BW = random_ids((2, 17))
    true = numpy_losses(model, ids_BW)
    loss = jax.jit(minigpt.loss_fn)(minigpt.gather(model), minigpt.to_devices(ids_BW))
    np.testing.assert_allclose(loss, np.mean(true), rtol=1e-6)
    found_B = minigpt.eval_step(model, minigpt.to_devices(ids_BW))
    np.testing.assert_allclose(found_B, np.mean(true, axis=1), rtol=1e-6)


def test_the_untrained_loss_is_near_ln_of_the_real_vocabulary():
    ((loss, _),) = run_steps('1,1', steps=1)[0]
    assert abs(loss - math.log(VOCAB)) < 0.1


def test_the_logits_of_all_tokens_are_never_in_memory_at_once():
    model = tiny_model(vocab_size=8192)
    ids_BW = minigpt.to_devices(np.zeros((512, 17)))
    lowered = jax.jit(jax.value_and_grad(minigpt.loss_fn)).lower(minigpt.gather(model), ids_BW)
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporary < 512 * 16 * 8192 * 4 / 2  # bytes of the logits (B, T, V)


def test_losses_are_the_same_on_every_mesh():
    losses = {mesh: run_steps(mesh)[0] for mesh in MESHES}
    for mesh, found in losses.items():
        np.testing.assert_allclose(found, losses['1,1'], atol=1e-5, err_msg=mesh)
    assert losses['1,1'][0, 0] != losses['1,1'][1, 0]


def test_in_float64_thirty_steps_are_the_same_on_every_mesh_to_twelve_digits(monkeypatch):
    """Meshes differ by the order of additions alone: with more digits the difference goes away."""
    double = fork(
        ('jnp.float32', 'jnp.float64'),
        ('dtype=config.dtype, rngs', 'dtype=config.dtype, param_dtype=config.dtype, rngs'),
    )
    monkeypatch.setattr(sys.modules[__name__], 'minigpt', double)
    with jax.enable_x64(True):
        true, _ = run_steps('1,1', 30, dtype='float64')
        for mesh, accum_steps in [('8,1', 1), ('4,2', 1), ('2,4', 4), ('1,8', 2)]:
            found, _ = run_steps(mesh, 30, accum_steps=accum_steps, dtype='float64')
            np.testing.assert_allclose(found, true, rtol=1e-12, err_msg=mesh)
    assert true.dtype == np.float64
    assert len(np.unique(true)) == true.size


@pytest.mark.parametrize('mesh', ['1,1', '4,2'])
def test_micro_batches_change_neither_loss_nor_gradient(mesh):
    one, _ = run_steps(mesh, steps=3, batch_size=16)
    four, _ = run_steps(mesh, steps=3, batch_size=16, accum_steps=4)
    np.testing.assert_allclose(four, one, atol=1e-5)


def written_rates(peak, warmup, steps):
    """The learning rate of each step, and the one after the last."""
    rates = [peak * (step + 1) / (warmup + 1) for step in range(warmup)]
    for step in range(warmup, steps + 1):
        cosine = math.cos(math.pi * (step - warmup) / (steps - warmup))
        rates.append(peak * (0.1 + 0.9 * (1 + cosine) / 2))
    return rates


@pytest.mark.parametrize('warmup, steps', [(3, 8), (0, 5), (20, 1000)])
def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth_of_it(warmup, steps):
    schedule = minigpt.learning_rate_schedule(0.01, warmup, steps)
    rates = schedule(jnp.arange(steps + 1))
    np.testing.assert_allclose(rates, written_rates(0.01, warmup, steps), rtol=1e-5)


@pytest.mark.parametrize('steps', [1, 2, 5])
def test_a_run_that_is_shorter_than_the_warm_up_reaches_the_peak_in_its_last_step(steps):
    schedule = minigpt.learning_rate_schedule(0.01, 20, steps)
    rates = [schedule(step) for step in range(steps)]
    np.testing.assert_allclose(rates, np.arange(1, steps + 1) * 0.01 / steps, rtol=1e-5)


def test_the_step_is_clipped_adamw_on_the_written_schedule():
    model = tiny_model()
    decay, clip_norm, rates = 0.1, 0.05, written_rates(0.01, 3, 8)
    schedule = minigpt.learning_rate_schedule(0.01, 3, 8)
    optimizer = minigpt.create_optimizer(model, schedule, decay, clip_norm)
    ids_BW = minigpt.to_devices(random_ids((4, 17)))
    grad = jax.jit(jax.grad(lambda model: minigpt.loss_fn(minigpt.gather(model), ids_BW)))

    def arrays(tree):
        return [np.asarray(a, np.float64) for a in jax.tree.leaves(tree)]

    p = arrays(model)
    m, v = [0 * a for a in p], [0 * a for a in p]
    for step in range(3):
        g = arrays(grad(model))
        norm = math.sqrt(sum((a**2).sum() for a in g))
        model, optimizer, metrics = minigpt.train_step(model, optimizer, ids_BW, jax.random.key(0))
        np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-4)
        assert norm > clip_norm  # so that clipping is at work
        for i, found in enumerate(arrays(model)):
            clipped = g[i] * clip_norm / norm
            m[i] = 0.9 * m[i] + 0.1 * clipped
            v[i] = 0.95 * v[i] + 0.05 * clipped**2
            m_hat, v_hat = m[i] / (1 - 0.9 ** (step + 1)), v[i] / (1 - 0.95 ** (step + 1))
            update = m_hat / (np.sqrt(v_hat) + 1e-8) + decay * p[i] * (p[i].ndim > 1)
            true = p[i] - rates[step] * update
            sure = np.abs(g[i]) > 1e-5  # Adam turns rounding noise near 0 into whole steps
            np.testing.assert_allclose(found[sure], true[sure], atol=2e-5)
        p = arrays(model)


def test_dropout_acts_in_training_alone_and_differs_from_step_to_step():
    model = tiny_model(dropout=0.5)
    ids_BW = minigpt.to_devices(random_ids((4, 17)))
    mean = jax.jit(lambda model, key: minigpt.loss_fn(minigpt.gather(model), ids_BW, key))
    first, again, other = (float(mean(model, jax.random.key(i))) for i in (0, 0, 1))
    off = float(mean(model, None))
    assert first == again
    assert len({first, other, off}) == 3
    assert off == float(mean(tiny_model(dropout=0.0), None))
    assert np.isclose(float(minigpt.eval_step(model, ids_BW).mean()), off)
    optimizer = minigpt.create_optimizer(model, 0.0)
    seen = []
    for _ in range(2):  # the same windows and parameters, another step
        model, optimizer, metrics = minigpt.train_step(
            model, optimizer, ids_BW, jax.random.key(0), 2
        )
        seen.append(float(metrics['loss']))
    assert seen[0] != seen[1]


def test_dropout_zeroes_its_share_and_scales_up_the_rest():
    """Both branches of this block add ones: of each number 0, 1 or 2 of them are left."""
    model = tiny_model(dropout=0.25, embed_dim=128)
    block = model.transformer_blocks[0]

    def fill(parameter, value):
        parameter[...] = jnp.full_like(parameter[...], value)

    for norm in (block.norm1, block.norm2):
        fill(norm.scale, 0)
        fill(norm.bias, 1)
    for parameter, inputs in [
        (block.qkv, 128),
        (block.out, 128),
        (block.up, 128),
        (block.down, 32),
    ]:
        fill(parameter, 1 / inputs)
    x_BTD, _ = block(jnp.zeros((8, 16, 128)), rngs=nnx.Rngs(dropout=0))
    dropped = np.asarray(x_BTD) * 0.75
    np.testing.assert_allclose(dropped, dropped.round(), atol=1e-5)
    shares = np.bincount(dropped.round().astype(int).ravel()) / dropped.size
    np.testing.assert_allclose(shares, [0.25**2, 2 * 0.25 * 0.75, 0.75**2], atol=0.02)


def test_each_micro_batch_has_dropout_of_its_own():
    """Else the loss of eight that hold the same window would vary as that of one does."""
    model = tiny_model(dropout=0.5)
    optimizer = minigpt.create_optimizer(model, 0.0, 0.0)  # learns nothing
    deviation = {}
    for n in (1, 8):
        ids_BW = minigpt.to_devices(np.repeat(random_ids((1, 17)), n, axis=0))
        losses = []
        for _ in range(300):
            model, optimizer, metrics = minigpt.train_step(
                model, optimizer, ids_BW, jax.random.key(0), n
            )
            losses.append(float(metrics['loss']))
        deviation[n] = np.std(losses)
    assert deviation[8] / deviation[1] == pytest.approx(8**-0.5, rel=0.3)


@pytest.mark.parametrize('accum_steps', [1, 4])
def test_the_validation_loss_is_the_mean_over_all_held_out_windows(accum_steps, tmp_path):
    path = write_text(tmp_path / 'text.txt', stories=32)
    arguments = [
        f'--data={path}',
        f'--workdir={tmp_path / "run"}',
        '--tokenizer=bytes',
        '--prompt=the',
    ]
    parse(*TINY, *arguments, '--batch_size=8', '--mesh=1,1', f'--accum_steps={accum_steps}')
    run = minigpt.Run()
    model = tiny_model(vocab_size=257)
    assert len(run.held_out) == 11  # they fill no batches of 8 or 2
    true = numpy_losses(model, run.held_out.astype(np.int32), 257)
    val_loss, story = run.evaluate(model)
    assert float(val_loss) == pytest.approx(np.mean(true), rel=1e-6)
    assert story.startswith('the')


def test_many_arrays_on_many_devices_are_trained_and_evaluated_without_a_deadlock(tmp_path):
    path = write_text(tmp_path / 'text.txt', stories=400)
    run = cli(
        *TINY,
        '--num_transformer_blocks=8',
        f'--data={path}',
        '--tokenizer=words',
        '--mesh=4,2',
        '--batch_size=8',
        '--max_steps=2',
        f'--workdir={tmp_path / "run"}',
    )
    assert run.returncode == 0, run.stderr


# ---- Reports and profile -------------------------------------------------------------------------
def read_metrics(workdir):
    with open(workdir / 'metrics.csv') as file:
        return list(csv.DictReader(file))


def test_each_event_is_a_row_of_metrics_csv(tmp_path):
    path = write_text(tmp_path / 'text.txt')
    arguments = [
        f'--data={path}',
        '--batch_size=8',
        '--mesh=1,1',
        '--log_every=2',
        '--eval_every=3',
    ]
    rows = train(tmp_path / 'run', *arguments, '--max_steps=7')
    training = {'loss', 'grad_norm', 'learning_rate', 'tokens_per_s'}
    found = [(int(row['step']), {name for name in row if row[name]} - {'step'}) for row in rows]
    true = [(0, {'val_loss'}), (2, training), (3, {'val_loss'}), (4, training), (6, training)]
    assert found == [*true, (6, {'val_loss'}), (7, training), (7, {'val_loss'})]
    rates = written_rates(1e-3, 6, 7)  # the rate that led to step n is that of update n - 1
    for row in rows:
        if row['loss']:
            rate = float(row['learning_rate'])
            assert rate == pytest.approx(rates[int(row['step']) - 1], rel=1e-5)


def test_a_row_reads_back_as_the_same_float32(tmp_path):
    log = minigpt.Log(tmp_path, 0, 10**6, 1000)
    values = np.exp(np.random.default_rng(0).normal(0, 10, (200, 3))).astype(np.float32)
    for step, (loss, grad_norm, rate) in enumerate(values, 1):
        metrics = {'loss': jnp.asarray(loss), 'grad_norm': jnp.asarray(grad_norm)}
        log.training(step, metrics, jnp.asarray(rate))
        log.write(step=step, val_loss=loss)
    rows = read_metrics(tmp_path)
    columns = ['loss', 'grad_norm', 'learning_rate']
    found = [[np.float32(row[name]) for name in columns] for row in rows[::2]]
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal([np.float32(row['val_loss']) for row in rows[1::2]], values[:, 0])


def test_rows_after_the_restored_step_are_cut_and_those_before_it_stay(tmp_path):
    log = minigpt.Log(tmp_path, 0, 20, 1000)
    for step in range(13):
        log.write(step=step, loss=step / 8)
        log.write(step=step, val_loss=step / 4)
    before = (tmp_path / 'metrics.csv').read_text().splitlines()
    minigpt.Log(tmp_path, 9, 20, 1000)
    after = (tmp_path / 'metrics.csv').read_text()
    assert after.splitlines() == before[: 1 + 2 * 10]
    minigpt.Log(tmp_path, 9, 20, 1000).write(step=10, val_loss=0.5)
    assert (tmp_path / 'metrics.csv').read_text() == after + '10,,,,,0.5\n'
    minigpt.Log(tmp_path, 0, 20, 1000)  # a run that begins anew
    assert (tmp_path / 'metrics.csv').read_text().splitlines() == before[:1]


def test_the_speed_is_that_of_the_steps_alone(tmp_path, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(minigpt.time, 'perf_counter', lambda: now[0])
    log = minigpt.Log(tmp_path, 2, 20, 1000)
    metrics = {'loss': jnp.float32(1.5), 'grad_norm': jnp.float32(0.25)}
    now[0] += 2
    log.training(6, metrics, 0.001)  # 4 steps of 1,000 tokens in 2 seconds
    now[0] += 100
    log.validation(6, 1.5, 'a story')  # whose 100 seconds do not count
    now[0] += 60
    log.training(8, metrics, 0.001)
    speeds = [float(row['tokens_per_s']) for row in read_metrics(tmp_path) if row['loss']]
    assert speeds == [4 * 1000 / 2, round(2 * 1000 / 60, 1)]
    first, *_, last = capsys.readouterr().out.splitlines()
    assert (
        first == 'step 6/20 | loss 1.5000 | grad 0.25 | lr 1.0e-03 | 2,000 tokens/s | 0.1 min left'
    )
    assert last.endswith(' | 6.0 min left')  # 12 steps of 30 seconds


def test_the_curve_is_a_picture_of_the_rows(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    figures, save = [], Figure.savefig

    def savefig(self, *arguments, **options):
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, 'savefig', savefig)
    log = minigpt.Log(tmp_path, 0, 9, 1000, entropy=0.5)
    log.validation(0, 5.0, 'a story')  # no loss yet
    metrics = {'loss': jnp.float32(4.5), 'grad_norm': jnp.float32(1)}
    log.training(1, metrics, 0.1)
    log.training(2, metrics | {'loss': jnp.float32(4.0)}, 0.1)
    log.validation(2, 4.25, 'another story')
    assert (tmp_path / 'loss.png').read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
    picture = imread(tmp_path / 'loss.png')  # reads all of it
    assert picture.ndim == 3
    assert np.ptp(picture) > 0.5
    curves = {line.get_label(): line.get_xydata().tolist() for line in figures[-1].axes[0].lines}
    assert curves['loss'] == [[1, 4.5], [2, 4]]
    assert curves['val_loss'] == [[0, 5], [2, 4.25]]
    assert [y for _, y in curves['entropy']] == [0.5, 0.5]
    assert sorted(file.name for file in tmp_path.iterdir()) == ['loss.png', 'metrics.csv']


def test_flops_are_those_of_xlas_cost_analysis_of_the_default_model(monkeypatch):
    minigpt.create_mesh('1,1')
    config = minigpt.ModelConfig(50304, dtype='float32')  # a vocabulary that needs no padding
    model = jax.eval_shape(lambda: minigpt.MiniGPT(config, nnx.Rngs(0)))
    monkeypatch.setattr(minigpt, 'CHUNK', 2 * 256)  # all in one: XLA counts a loop's body once
    ids_BW = minigpt.to_devices(np.zeros((2, 257)))
    forward = jax.jit(lambda model, ids_BW: minigpt.loss_fn(minigpt.gather(model), ids_BW))
    counted = forward.lower(model, ids_BW).cost_analysis()['flops']  # not compiled
    assert minigpt.step_flops(config, 2 * 256) / 3 == pytest.approx(counted, rel=0.05)


def numbers(text, unit):
    """The numbers that stand before the unit."""
    return [float(found.replace(',', '')) for found in re.findall(rf'([\d.,]+){unit}', text)]


@pytest.mark.parametrize('mesh', ['1,1', '4,2'])
def test_the_profile_says_where_the_time_of_the_steps_went(mesh, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(minigpt.PEAKS, 'cpu', 1e-4)  # TFLOP/s
    path = write_text(tmp_path / 'text.txt')
    arguments = [f'--data={path}', '--batch_size=8', f'--mesh={mesh}', '--eval_every=0']
    arguments += ['--log_every=1', '--max_steps=12', '--accum_steps=1']
    plain = train(tmp_path / 'plain', *arguments)
    capsys.readouterr()
    rows = train(tmp_path / 'run', *arguments, '--profile_steps=6')
    out = capsys.readouterr().out
    speed, shares = re.search(r'--- 6 steps traced: .*\n(.*)\n(.*)\n', out).groups()
    (ms,) = numbers(speed, ' ms a step')
    assert numbers(speed, ' ms an example') == [pytest.approx(ms / 8, abs=0.02)]
    assert numbers(speed, ' tokens/s') == [pytest.approx(8 * 16 / ms * 1e3, rel=0.05)]
    (teraflops,) = numbers(speed, ' TFLOP/s')
    flops = minigpt.step_flops(minigpt.ModelConfig(257, **SIZES), 8 * 16)
    assert teraflops == pytest.approx(flops / ms / 1e9, abs=0.001)
    devices = math.prod(map(int, mesh.split(',')))
    (mfu,) = map(float, re.findall(r'MFU (\d+)%', speed))
    assert mfu == pytest.approx(100 * flops / ms / 1e9 / devices / 1e-4, rel=0.05, abs=0.6)

    share = {name: float(part) for name, part in re.findall(r'([a-z]+) (-?[\d.]+)%', shares)}
    assert set(share) == {'compute', 'collectives', 'idle', 'input'}
    assert all(0 <= part <= 100 for part in share.values())
    parts = share['compute'] + share['collectives'] + share['idle']
    assert parts == pytest.approx(100, abs=0.2)
    assert share['compute'] > 0
    assert share['input'] > 0
    assert share['collectives'] > 0 or mesh == '1,1'
    assert len(list((tmp_path / 'run/profile').rglob('*.xplane.pb'))) == 1
    # The traced steps are steps of the run.
    assert [row['loss'] for row in rows] == [row['loss'] for row in plain]


def test_a_resumed_run_can_be_profiled_again(tmp_path, capsys):
    path = write_text(tmp_path / 'text.txt')
    arguments = [f'--data={path}', '--batch_size=8', '--mesh=1,1', '--eval_every=0']
    arguments.append('--profile_steps=2')
    train(tmp_path / 'run', *arguments, '--max_steps=7')  # the last step is traced, and logged
    train(tmp_path / 'run', *arguments, '--max_steps=15')
    assert capsys.readouterr().out.count('--- 2 steps traced') == 2
    with pytest.raises(minigpt.UserError, match='--max_steps=22 or more: it is 16'):
        train(tmp_path / 'run', *arguments, '--max_steps=16')


def test_the_shares_of_the_profile_are_those_of_the_traced_events(tmp_path, monkeypatch, capsys):
    """A made-up trace of 2 devices and 1,000 ns: overlaps count once, loops hold what they run."""

    def event(name, start, end, **stats):
        return types.SimpleNamespace(
            name=name, start_ns=start, end_ns=end, duration_ns=end - start, stats=stats.items()
        )

    def operation(name, start, end, device):
        return event('thunk', start, end, hlo_op=name, device_ordinal=device)

    first = [
        operation('dot.1', 0, 300, 0),
        operation('fusion.2', 200, 400, 0),  # 100 ns of it are the first one's
        operation('all-reduce.3', 400, 450, 0),
        operation('while.4', 0, 1000, 0),
        event('input', 450, 475),
        event('something of the host', 0, 1000),
    ]
    second = [
        operation('reduce-scatter.5', 0, 50, 1),
        operation('all-gather-start.6', 100, 150, 1),
        operation('collective-permute.7', 100, 140, 1),  # within the one before
        operation('dot.8', 500, 700, 1),
        event('input', 475, 500),
    ]
    lines = [types.SimpleNamespace(events=events) for events in (first, second)]
    plane = types.SimpleNamespace(name='/host:CPU', lines=lines)
    trace = types.SimpleNamespace(planes=[plane])
    monkeypatch.setattr(jax.profiler.ProfileData, 'from_file', lambda path: trace, raising=False)
    minigpt.create_mesh('2,1')
    config = minigpt.ModelConfig(VOCAB, **SIZES)
    profiler = minigpt.Profiler(minigpt.Log(tmp_path, 0, 20, 128), config, 10)
    profiler.folder.mkdir(parents=True)
    (profiler.folder / 'a.xplane.pb').touch()
    profiler.report(1000e-9)
    out = capsys.readouterr().out
    # Of 2 x 1,000 ns: (400 + 200) compute, (50 + 50 + 50) collectives. Of 1,000 ns: 50 input.
    assert 'compute 30.0% | collectives 7.5% | idle 62.5% | input 5.0%' in out
    assert 'MFU unknown' in out


# ---- The sampler ---------------------------------------------------------------------------------
def counting_model(tokenizer, mesh='1,1', sharpness=8.0):
    """A model whose next token is known: the one numbered one higher, whatever the position."""
    model = tiny_model(mesh, vocab_size=tokenizer.n_vocab)
    rng = np.random.default_rng(0)
    vectors = rng.choice([-1.0, 1.0], model.output_layer.shape).astype(np.float32)

    def put(parameter, values):
        values = np.broadcast_to(values, parameter.shape).astype(np.float32)
        parameter[...] = jax.device_put(values, parameter[...].sharding)

    for block in model.transformer_blocks:
        put(block.out, 0)
        put(block.down, 0)
    put(model.embedding_layer.token_emb, vectors)
    put(model.embedding_layer.pos_emb, 0)
    following = np.roll(vectors, 1, axis=0) * sharpness
    following[tokenizer.n_vocab :] = 100 * vectors.sum(0)  # padding shouts, and must not be heard
    put(model.output_layer, following)
    return model


def write(model, tokenizer, prompt='', **options):
    return minigpt.generate_text(model, tokenizer, prompt, **{'seed': 0} | options)


@pytest.mark.parametrize('mesh', ['1,1', '4,2', '1,8'])
def test_a_model_whose_next_token_is_known_writes_it(mesh):
    tokenizer = minigpt.load_tokenizer('bytes')
    model = counting_model(tokenizer, mesh)
    for temperature in (0.0, 1.0):
        assert write(model, tokenizer, 'abc', temperature=temperature) == ['abcdefghijklmno']
    assert write(model, tokenizer, 'ab', max_new_tokens=3) == ['abcde']
    assert write(model, tokenizer, 'ab', max_new_tokens=300) == ['abcdefghijklmno']
    assert write(model, tokenizer, 'ab', num_samples=3) == ['abcdefghijklmno'] * 3


def test_it_stops_at_end_of_text_and_writes_nothing_after_it():
    tokenizer = minigpt.load_tokenizer('words', ['yes', 'no'])  # ids 256, 257; end-of-text 258
    model = counting_model(tokenizer)
    assert write(model, tokenizer, 'yes', temperature=0.0) == ['yesno']
    assert write(model, tokenizer, 'yes', num_samples=2, temperature=0.5) == ['yesno'] * 2


def test_a_row_that_has_ended_waits_for_those_that_have_not():
    tokenizer = minigpt.load_tokenizer('words', ['yes', 'no'])
    model = counting_model(tokenizer)
    ids_BT = np.zeros((2, 16))
    ids_BT[:, :2] = [[258, 257], [258, 97]]  # 'no', which the end follows, and 'a'
    ids_BT = minigpt.to_devices(ids_BT)
    found = np.asarray(
        minigpt.generate_tokens(model, ids_BT, 2, 16, 258, jax.random.key(0), 0.0, 10)
    )
    assert found[0, :3].tolist() == [258, 257, 258]
    assert found[1].tolist() == [258, *range(97, 112)]
    alone = np.asarray(
        minigpt.generate_tokens(model, ids_BT[:1], 2, 16, 258, jax.random.key(0), 0.0, 10)
    )
    assert alone[0].tolist() == [258, 257, 258, *[0] * 13]  # and then nothing more is computed


def test_half_a_character_at_the_end_is_not_written():
    tokenizer = minigpt.load_tokenizer('bytes')
    model = counting_model(tokenizer)
    assert 'é'.encode() == b'\xc3\xa9'  # \xaa follows, which begins no character
    assert write(model, tokenizer, 'é', max_new_tokens=1, temperature=0.0) == ['é']


def test_cached_decoding_gives_the_logits_of_the_full_forward_pass():
    model = sharpened(tiny_model('2,4'), 4)
    ids_BT = random_ids((2, 16))

    @jax.jit
    def both(model, ids_BT):
        model = minigpt.gather(model)
        full, _ = model(ids_BT)
        _, caches = model(ids_BT.at[:, 5:].set(0))  # a prompt of 5, and what pads it
        steps = []
        for index in range(5, 16):
            x_B1D, caches = model(ids_BT[:, index : index + 1], caches, index)
            steps.append(x_B1D)
        return full[:, 5:], jnp.concatenate(steps, 1)

    full, cached = both(model, minigpt.to_devices(ids_BT))
    np.testing.assert_allclose(cached, full, atol=1e-5)


def test_greedy_text_is_that_of_a_full_forward_pass_for_every_token():
    end, maxlen = 256, SIZES['maxlen']
    model = sharpened(tiny_model('1,1', vocab_size=257), 8)
    ids = [end, *b'abc']
    while len(ids) < maxlen and (len(ids) < 5 or ids[-1] != end):
        padded = np.array([ids + [0] * (maxlen - len(ids))], np.int32)
        ids.append(int(logits(model, padded)[0, len(ids) - 1, :257].argmax()))
    prompt = np.array([ids[:4] + [0] * (maxlen - 4)], np.int32)
    found = minigpt.generate_tokens(
        model,
        minigpt.to_devices(prompt),
        4,
        maxlen,
        end,
        key=jax.random.key(0),
        temperature=0.0,
        top_k=0,
    )
    assert np.asarray(found)[0, : len(ids)].tolist() == ids
    assert len(ids) > 8
    assert len(set(ids)) > 4


def test_tokens_are_drawn_from_the_softmax_of_the_k_largest_logits_over_temperature():
    tokenizer = minigpt.load_tokenizer('bytes')
    model = counting_model(tokenizer, sharpness=0.08)  # a soft distribution after each token
    temperature, k, rows = 0.7, 4, 4096
    start = np.zeros((rows, SIZES['maxlen']), np.int32)
    drawn = minigpt.generate_tokens(
        model,
        minigpt.to_devices(start),
        1,
        3,
        tokenizer.eot_token,
        jax.random.key(1),
        temperature,
        k,
    )
    first, second = np.asarray(drawn)[:, 1], np.asarray(drawn)[:, 2]
    assert not np.asarray(drawn)[:, 3:].any()  # nothing from `stop` on
    z = logits(model, start[:1])[0, 0, : tokenizer.n_vocab]
    best = np.argsort(z)[-k:]
    true = np.exp(z[best] / temperature) / np.exp(z[best] / temperature).sum()
    counts = np.array([(first == token).sum() for token in best])
    assert counts.sum() == rows  # nothing outside the top k
    assert (np.abs(counts / rows - true) < 5 * np.sqrt(true / rows)).all()
    # A new key for each position: after the same first token the second one varies as well.
    same = second[first == best[-1]]
    assert len(set(same.tolist())) == k
    ranks = [np.argsort(np.argsort(-np.bincount(a, minlength=384))) for a in (first, second)]
    assert not np.array_equal(*ranks)


def test_a_top_k_of_0_or_above_the_vocabulary_draws_from_all():
    tokenizer, model = minigpt.load_tokenizer('bytes'), tiny_model(vocab_size=257)
    ids_BT = minigpt.to_devices(np.zeros((4096, 16)))
    found = minigpt.generate_tokens(model, ids_BT, 1, 2, 256, jax.random.key(0), 1.0, 0)
    assert len(np.unique(np.asarray(found)[:, 1])) == 257  # an untrained model is nearly uniform
    texts = write(model, tokenizer, 'a', num_samples=4, top_k=0)
    assert texts == write(model, tokenizer, 'a', num_samples=4, top_k=1000)
    greedy = write(model, tokenizer, 'a', temperature=0.0)
    assert greedy == write(model, tokenizer, 'a', top_k=1)


def test_greedy_text_is_the_same_on_every_mesh():
    tokenizer = minigpt.load_tokenizer('bytes')
    texts = []
    for mesh in MESHES:
        model = sharpened(tiny_model(mesh, vocab_size=257), 8)
        texts += write(model, tokenizer, 'ab', temperature=0.0)
    assert texts == texts[:1] * 5
    assert len(texts[0]) > 5


def test_a_model_trained_on_short_stories_stops_where_they_stop(tmp_path, capsys, monkeypatch):
    path = tmp_path / 'text.txt'
    path.write_text('ab<|endoftext|>' * 600)
    arguments = [f'--data={path}', '--batch_size=8', '--mesh=1,1', '--num_epochs=4']
    rows = train(tmp_path / 'run', *arguments, '--learning_rate=1e-2', '--eval_every=0')
    windows = 600 * 3 // 16  # tokens after the first are 600 x (a, b, end)
    training = windows - math.ceil(windows / 10)
    assert int(rows[-1]['step']) == training * 4 // 8
    capsys.readouterr()
    parse('--mode=sample', f'--workdir={tmp_path / "run"}', '--prompt=a', '--temperature=0')
    minigpt.sample()
    assert capsys.readouterr().out == 'ab\n'


def test_ids_that_stand_for_nothing_are_not_written():
    ranks = {bytes([i]): (i - 123) % 256 for i in range(256)}  # z has the last id before a gap
    tokenizer = tiktoken.Encoding(
        'gap', pat_str='.', special_tokens={'<|endoftext|>': 299}, mergeable_ranks=ranks
    )
    assert write(counting_model(tokenizer), tokenizer, 'x', temperature=0.0) == ['xyz']
    # untrained: it draws the 43 unused ids as often as others
    texts = write(tiny_model(), tokenizer, 'a', temperature=100.0, top_k=0, num_samples=8)
    assert all(text.startswith('a') for text in texts)


def test_samples_differ_from_each_other_and_repeat_with_their_seed():
    tokenizer, model = minigpt.load_tokenizer('bytes'), tiny_model('4,2', vocab_size=257)
    texts = write(model, tokenizer, 'abc', num_samples=3, top_k=0)
    assert len(set(texts)) == 3
    assert texts == write(model, tokenizer, 'abc', num_samples=3, top_k=0)
    assert texts != write(model, tokenizer, 'abc', num_samples=3, top_k=0, seed=1)


def test_one_compilation_serves_every_prompt():
    tokenizer, model = minigpt.load_tokenizer('bytes'), tiny_model(vocab_size=257)
    minigpt.generate_tokens.clear_cache()
    for prompt, temperature in [('', 1.0), ('a', 0.0), ('a longer one', 0.5)]:
        write(model, tokenizer, prompt, temperature=temperature)
    assert minigpt.generate_tokens._cache_size() == 1


def test_a_prompt_that_leaves_no_room_is_refused():
    tokenizer, model = minigpt.load_tokenizer('bytes'), tiny_model(vocab_size=257)
    assert write(model, tokenizer, 'x' * 14, temperature=0.0)[0].startswith('x' * 14)
    with pytest.raises(minigpt.UserError, match='16 tokens is too long for maxlen=16'):
        write(model, tokenizer, 'x' * 15)  # and end-of-text before it


# ---- The mesh ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ('text', 'shape'),
    [
        ('4,2', (4, 2)),
        ('2,4', (2, 4)),
        ('-1,2', (4, 2)),
        ('2,-1', (2, 4)),
        ('-1,1', (8, 1)),
        ('2,2', (2, 2)),  # fewer than there are
        ('1,1', (1, 1)),
        ('-1,3', (2, 3)),
    ],
)
def test_a_mesh_has_the_axes_in_the_order_of_the_flag_and_is_the_current_one(text, shape):
    mesh = minigpt.create_mesh(text)
    assert mesh.axis_names == ('batch', 'model') and mesh.devices.shape == shape
    assert jax.sharding.get_mesh() == mesh
    assert len(set(mesh.devices.flat)) == math.prod(shape)
    # Explicit axes: a type tells how its array is cut, so that a wrong cut fails while tracing.
    array = jax.device_put(np.zeros((24, 24)), jax.NamedSharding(mesh, P('batch', 'model')))
    assert jax.typeof(array).sharding.spec == P('batch', 'model')
    assert array.addressable_shards[0].data.shape == (24 // shape[0], 24 // shape[1])


@pytest.mark.parametrize(
    'text', ['3,3', '8,2', '-1,9', '9,-1', '4', '4x2', '0,8', '-1,-1', '-2,2', '4,2,1', '', ' 4,2']
)
def test_a_mesh_that_does_not_fit_is_refused_in_one_line_that_names_it(text):
    with pytest.raises(minigpt.UserError, match=re.escape(f'--mesh={text} ')) as error:
        minigpt.create_mesh(text)
    assert '\n' not in str(error.value)


def test_a_machine_with_one_cpu_simulates_as_many_devices_as_the_mesh_needs():
    """There, -1 is 1: more would be slower."""
    program = 'import minigpt; print(minigpt.create_mesh("-1,2").devices.shape)'
    run = subprocess.run(
        [sys.executable, '-c', program], cwd=SCRIPT.parent, capture_output=True, text=True
    )
    assert run.stdout.strip() == '(1, 2)', run.stderr


@pytest.mark.parametrize('mesh', MESHES)
def test_sizes_are_refused_with_the_next_size_that_fits(mesh):
    """For each size in turn: those that divide pass, others name the least larger one."""
    mesh = minigpt.create_mesh(mesh)
    batch, model = mesh.devices.shape
    good = {'embed_dim': 48, 'num_heads': 8, 'feed_forward_dim': 16}
    cases = [('batch_size', batch * 3, n) for n in range(1, 50)]
    cases += [('embed_dim', 8, n) for n in range(40, 57)]
    cases += [('feed_forward_dim', model, n) for n in range(1, 25)]
    for name, parts, n in cases:
        sizes = good | {'batch_size': batch * 3} | {name: n}
        rows = sizes.pop('batch_size')
        config = minigpt.ModelConfig(VOCAB, **sizes)
        if n % parts == 0:
            minigpt.check_sizes(config, mesh, rows, accum_steps=3)
            continue
        with pytest.raises(minigpt.UserError, match=f'--{name}={n} ') as error:
            minigpt.check_sizes(config, mesh, rows, accum_steps=3)
        (fix,) = re.findall(r'use (\d+)\.', str(error.value))
        assert n < int(fix) < n + parts and int(fix) % parts == 0


def test_heads_and_vocabulary_divide_by_the_model_axis():
    mesh = minigpt.create_mesh('1,8')
    config = minigpt.ModelConfig(VOCAB, embed_dim=32, num_heads=4)
    with pytest.raises(minigpt.UserError, match='--num_heads=4 .*use 8'):
        minigpt.check_sizes(config, mesh, batch_size=1)
    mesh = minigpt.create_mesh('1,3')  # of the padded vocabulary, a multiple of 128
    config = minigpt.ModelConfig(VOCAB, embed_dim=33, num_heads=3, feed_forward_dim=33)
    with pytest.raises(minigpt.UserError, match='--mesh=1,3'):
        minigpt.check_sizes(config, mesh, batch_size=1)


# ---- Checkpoint ----------------------------------------------------------------------------------
LONG = [*TINY, '--tokenizer=bytes', '--prompt=the', '--batch_size=16', '--accum_steps=2']
LONG += ['--dropout=0.1', '--max_steps=20', '--checkpoint_every=3', '--eval_every=10']
LONG += ['--log_every=1', '--keep=9']
SAVED = [3, 6, 9, 12, 15, 18, 20]


@pytest.fixture(autouse=True)
def handlers():
    """Leaves signals as they were: Ctrl-C is for pytest, not for a run that is long over."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp('text') / 'text.txt')  # 20 steps are two epochs of it


class Runs(dict):
    """{mesh: workdir} of runs that nothing stops, made when they are asked for."""

    def __init__(self, text, new_folder):
        self.text, self.new_folder = text, new_folder

    def __missing__(self, mesh):
        self[mesh] = self.new_folder('whole')
        train(self[mesh], *LONG, f'--data={self.text}', f'--mesh={mesh}')
        return self[mesh]


@pytest.fixture(scope='module')
def never_stopped(text, tmp_path_factory):
    return Runs(text, tmp_path_factory.mktemp)


@pytest.fixture
def stopped(never_stopped, tmp_path):
    """A run of the mesh 4,2 that was killed after step 11."""
    folder = tmp_path / 'stopped'
    shutil.copytree(never_stopped['4,2'], folder)
    for step in (12, 15, 18, 20):
        shutil.rmtree(folder / 'checkpoints' / str(step))
    return folder


def new_state(mesh='1,1', seed=9):
    """Model and optimizer in which there is nothing of a run yet."""
    model = tiny_model(mesh, vocab_size=257, seed=seed, dropout=0.1)
    return model, minigpt.create_optimizer(model, optax.constant_schedule(0.1))


def restored_state(workdir, mesh='1,1', step=20):
    """Model and optimizer of a run's newest checkpoint."""
    model, optimizer = new_state(mesh)
    checkpoints = minigpt.open_checkpoints(pathlib.Path(workdir), read_only=True)
    found, _ = minigpt.restore(checkpoints, model=model, optimizer=optimizer)
    assert found == step
    return model, optimizer


def state_of(workdir, mesh='1,1', step=20):
    """All arrays of a run's newest checkpoint."""
    return jax.device_get(jax.tree.leaves(restored_state(workdir, mesh, step)))


def rows_of(workdir):
    """metrics.csv without its clock."""
    with open(pathlib.Path(workdir) / 'metrics.csv') as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row['tokens_per_s']
    return rows


def saved_steps(workdir):
    folder = pathlib.Path(workdir) / 'checkpoints'
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def half_saved(workdir):
    return list((pathlib.Path(workdir) / 'checkpoints').glob('*tmp*'))


def contents(folder):
    """{path: bytes} of all files below a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


def assert_same_arrays(found, true):
    for a, b in zip(found, true, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_same_run(found, true):
    assert rows_of(found) == rows_of(true)
    assert_same_arrays(state_of(found), state_of(true))


def assert_near(found, true):
    """The same rows, with losses that differ by rounding."""
    for a, b in zip(found, true, strict=True):
        assert a['step'] == b['step']
        for name in ('loss', 'val_loss'):
            assert (a[name] == '') == (b[name] == '')
            if a[name]:
                assert math.isclose(float(a[name]), float(b[name]), abs_tol=1e-5)


def test_what_is_restored_is_what_was_saved_and_cut_as_the_new_mesh_needs(tmp_path):
    """Also when the step and the settings are read alone, as --mode=sample does first."""
    model, optimizer = new_state('4,2', seed=1)
    settings = {'words': ['a', 'naïve'], 'embed_dim': 32}
    saved = jax.device_get(jax.tree.leaves((model, optimizer)))
    checkpoints = minigpt.open_checkpoints(tmp_path)
    assert minigpt.restore(checkpoints) == (0, None)
    minigpt.save(checkpoints, 7, settings, model, optimizer)
    checkpoints.wait_until_finished()
    assert minigpt.restore(checkpoints) == (7, settings)
    for mesh in ('1,1', '8,1', '2,4'):
        model, optimizer = new_state(mesh)
        cuts = [a.sharding for a in jax.tree.leaves((model, optimizer))]
        assert minigpt.restore(checkpoints, model=model, optimizer=optimizer) == (7, settings)
        found = jax.tree.leaves((model, optimizer))
        assert [a.sharding for a in found] == cuts
        assert_same_arrays(jax.device_get(found), saved)


def test_the_arrays_may_be_given_away_as_soon_as_save_has_returned(tmp_path):
    """train_step donates them while Orbax still writes."""
    model, optimizer = new_state('4,2', seed=1)
    saved = jax.device_get(jax.tree.leaves((model, optimizer)))
    checkpoints = minigpt.open_checkpoints(tmp_path)
    minigpt.save(checkpoints, 1, {}, model, optimizer)
    ids_BW = minigpt.to_devices(random_ids((8, SIZES['maxlen'] + 1), vocab_size=257))
    minigpt.train_step(model, optimizer, ids_BW, jax.random.key(0))
    checkpoints.wait_until_finished()
    assert_same_arrays(state_of(tmp_path, step=1), saved)


def test_checkpoint_n_is_the_state_after_n_updates(never_stopped, tmp_path):
    """The optimizer counts its own updates."""
    shutil.copytree(never_stopped['4,2'], tmp_path / 'run')
    assert saved_steps(tmp_path / 'run') == SAVED
    for step in (20, 18):
        _, optimizer = restored_state(tmp_path / 'run', step=step)
        assert int(optimizer.step[...]) == step
        shutil.rmtree(tmp_path / 'run' / 'checkpoints' / str(step))


def test_reading_checkpoints_and_token_files_unpickles_nothing(
    text, never_stopped, monkeypatch, tmp_path
):
    whole = never_stopped['4,2']
    tokenizer = minigpt.load_tokenizer('bytes')
    minigpt.load_tokens(text, tokenizer, tmp_path)
    for name in ('load', 'loads', 'Unpickler'):
        monkeypatch.setattr(f'pickle.{name}', lambda *_, **__: pytest.fail('it was unpickled'))
    state_of(whole)
    minigpt.load_tokens(text, tokenizer, tmp_path)


def test_a_reader_changes_nothing_in_a_run(never_stopped, tmp_path):
    """--mode=sample may read while the run goes on: what is half-written stays."""
    folder = tmp_path / 'run'
    shutil.copytree(never_stopped['4,2'], folder)
    half = folder / 'checkpoints' / '21.orbax-checkpoint-tmp'
    shutil.copytree(folder / 'checkpoints' / '20', half)
    before = contents(folder)
    state_of(folder)
    assert contents(folder) == before


# ---- Whole runs ----------------------------------------------------------------------------------
def test_a_resumed_run_is_bit_for_bit_one_that_never_stopped(text, never_stopped, stopped):
    with open(stopped / 'metrics.csv', 'a') as file:
        file.write('17,1,1,1,1,1\n')  # as another run may have written it
    whole = stopped / 'checkpoints' / '9'
    shutil.copytree(whole, whole.with_name('13.orbax-checkpoint-tmp'))  # a save that was killed
    train(stopped, *LONG, f'--data={text}', '--mesh=4,2')
    assert_same_run(stopped, never_stopped['4,2'])
    assert saved_steps(stopped) == SAVED and not half_saved(stopped)


def test_each_event_of_a_run_has_a_row_of_its_own(never_stopped):
    """Step n is the state after n updates: 0 is validated alone; the other steps are logged too."""
    rows = rows_of(never_stopped['4,2'])
    events = [(0, 'val_loss')]
    for step in range(1, 21):
        events += [(step, 'loss')] + [(step, 'val_loss')] * (step % 10 == 0)
    assert len(rows) == len(events)
    for row, (step, name) in zip(rows, events, strict=True):
        assert int(row.pop('step')) == step
        filled = {column for column, value in row.items() if value}
        training = {'loss', 'grad_norm', 'learning_rate'}
        assert filled == (training if name == 'loss' else {'val_loss'})


def test_steps_are_logged_validated_and_saved_as_often_as_the_flags_say(text, tmp_path):
    """And the last one always is; what is saved has been logged; the newest --keep are kept."""
    arguments = ['--mesh=1,1', '--batch_size=8', '--max_steps=14', '--log_every=4', '--keep=2']
    rows = train(tmp_path, f'--data={text}', *arguments, '--eval_every=6', '--checkpoint_every=5')
    logged = [int(row['step']) for row in rows if row['loss']]
    validated = [int(row['step']) for row in rows if row['val_loss']]
    assert logged == [4, 5, 8, 10, 12, 14]
    assert validated == [0, 6, 12, 14]
    assert saved_steps(tmp_path) == [10, 14]


def test_the_last_validation_is_that_of_the_saved_model_on_the_end_of_the_text(text, never_stopped):
    """By NumPy, from the text itself: the last tenth of its windows, at most 64."""
    end = 256
    ids = [end]
    for story in text.read_bytes().split(b'<|endoftext|>'):
        ids += [*story.strip(), end]
    count = (len(ids) - 1) // 16
    windows = np.array([ids[16 * i : 16 * i + 17] for i in range(count)], np.int32)
    held_out = windows[count - min(64, math.ceil(count / 10)) :]
    model, _ = restored_state(never_stopped['4,2'])
    loss = numpy_losses(model, held_out, vocab_size=257).mean()
    assert math.isclose(float(rows_of(never_stopped['4,2'])[-1]['val_loss']), loss, abs_tol=1e-5)


@pytest.mark.parametrize('dropout', [0.0, 0.5])
def test_each_step_drops_other_activations(dropout, tmp_path):
    """All windows are the same and nothing is learned, so that only dropout can change a loss."""
    path = tmp_path / 'text.txt'
    path.write_text('a' * 15 + '<|endoftext|>' + ('a' * 15 + '<|endoftext|>') * 40)
    arguments = ['--batch_size=8', '--max_steps=6', '--mesh=1,1', '--log_every=1']
    arguments += ['--learning_rate=0', f'--dropout={dropout}', '--eval_every=0']
    rows = train(tmp_path / 'run', f'--data={path}', *arguments)
    losses = [float(row['loss']) for row in rows if row['loss']]
    assert len(losses) == 6
    apart = np.diff(np.sort(losses))
    assert (apart > 1e-4).all() if dropout else (apart < 1e-5).all()


def signal_after(step, number, monkeypatch):
    """Sends this process a signal when a step has been logged, while the next is not begun."""
    log = minigpt.Log.training

    def log_and_signal(self, n, *values):
        log(self, n, *values)
        if n == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(minigpt.Log, 'training', log_and_signal)


@pytest.mark.parametrize(
    ('number', 'step'),
    [
        (signal.SIGTERM, 9),  # it stops after step 10, where a validation is due
        (signal.SIGINT, 19),  # and here at the end
    ],
)
def test_a_signal_lets_the_step_end_and_saves_and_the_run_goes_on_exactly(
    number, step, text, never_stopped, tmp_path, monkeypatch, capfd
):
    arguments = [*LONG, f'--data={text}', '--mesh=4,2', '--checkpoint_every=0']
    with monkeypatch.context() as patches:
        signal_after(step, number, patches)
        with pytest.raises(SystemExit) as stop:
            train(tmp_path, *arguments)
    assert stop.value.code == 128 + number
    assert saved_steps(tmp_path) == [step + 1]
    out, err = capfd.readouterr()
    assert f'step {step + 1} of 20: saved in {tmp_path}' in out and 'stopping after' in err
    train(tmp_path, *arguments)
    assert_same_run(tmp_path, never_stopped['4,2'])


def wait_for_steps(process, workdir):
    """Waits until a few steps have been logged."""
    assert wait_until(process, (workdir / 'metrics.csv').exists), process.communicate()
    assert wait_until(process, lambda: len(rows_of(workdir)) > 2), process.communicate()


def end_of(process, seconds=200):
    """(stdout, stderr) of a process that is about to end; one that hangs is killed and fails."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def test_a_second_signal_ends_a_run_at_once_and_unsaved(tmp_path):
    """Before the first step has ended, which is made long: it has 200 micro-batches."""
    path = write_text(tmp_path / 'text.txt', stories=1000)
    arguments = [*TINY, '--maxlen=32', '--tokenizer=bytes', '--prompt=the', f'--data={path}']
    arguments += ['--batch_size=800', '--accum_steps=200', '--mesh=4,2', '--max_steps=1000']
    process = start(*arguments, f'--workdir={tmp_path / "run"}', '--log_every=1')
    assert wait_until(process, (tmp_path / 'run' / 'metrics.csv').exists), process.communicate()
    assert wait_until(process, lambda: len(rows_of(tmp_path / 'run')) > 1), process.communicate()
    process.send_signal(signal.SIGTERM)
    first_line = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = end_of(process)
    assert 'stopping after this step' in first_line + err
    assert process.returncode == -signal.SIGTERM
    assert not saved_steps(tmp_path / 'run')


def test_sigterm_saves_also_when_the_reader_of_the_log_has_ended(text, never_stopped, tmp_path):
    """As Ctrl-C ends the other part of `| tee log`. The same command goes on exactly."""
    arguments = [*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={tmp_path}']
    process = start(*arguments, '--checkpoint_every=0')
    wait_for_steps(process, tmp_path)
    process.stdout.close()
    process.send_signal(signal.SIGTERM)
    err = process.stderr.read()
    assert process.wait(timeout=100) == 143 and 'Traceback' not in err, err
    (step,) = saved_steps(tmp_path)
    assert step < 20
    train(tmp_path, *arguments)
    assert_same_run(tmp_path, never_stopped['4,2'])


def test_a_process_killed_inside_a_save_goes_on_exactly(text, never_stopped, tmp_path):
    arguments = [*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={tmp_path}']
    process = start(*arguments)

    def is_saving():
        return half_saved(tmp_path) and 6 in saved_steps(tmp_path)

    assert wait_until(process, (tmp_path / 'checkpoints').exists), process.communicate()
    while True:
        assert wait_until(process, is_saving), process.communicate()
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)  # until it stands still: inside the save, unless that has just ended
        if is_saving():
            break
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    assert half_saved(tmp_path) and 20 not in saved_steps(tmp_path)
    train(tmp_path, *arguments)
    assert not half_saved(tmp_path)
    assert_same_run(tmp_path, never_stopped['4,2'])


def test_a_run_says_that_it_has_saved_when_the_checkpoint_is_whole(text, tmp_path, monkeypatch):
    """Also on a slow disk: the last step of a save, the renaming of its folder, takes long here."""
    seen = []

    def slowly(rename):
        def rename_late(source, target, **options):
            if 'checkpoints' in str(source):
                time.sleep(0.5)
            return rename(source, target, **options)

        return rename_late

    def look(text, file=None):
        if 'saved in' in text:
            seen.append((saved_steps(tmp_path), half_saved(tmp_path)))

    monkeypatch.setattr(os, 'rename', slowly(os.rename))
    monkeypatch.setattr(os, 'replace', slowly(os.replace))
    monkeypatch.setattr(minigpt, 'say', look)
    arguments = ['--mesh=1,1', '--batch_size=8', '--max_steps=2', '--eval_every=0']
    train(tmp_path, f'--data={text}', *arguments)
    assert seen == [([2], [])]


def test_a_token_file_has_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    """So that a process that is killed while it tokenises leaves none that the next would take."""
    path = write_text(tmp_path / 'text.txt', stories=1500)
    tokenizer = minigpt.load_tokenizer('bytes')
    encode = type(tokenizer).encode_ordinary_batch
    calls = []

    def fail_later(self, stories):
        calls.append(list(tmp_path.glob('*.tokens')))
        if len(calls) == 2:
            raise OSError('no space is left')
        return encode(self, stories)

    with monkeypatch.context() as patches:
        patches.setattr(type(tokenizer), 'encode_ordinary_batch', fail_later)
        with pytest.raises(OSError, match='no space'):
            minigpt.load_tokens(path, tokenizer, tmp_path)
    assert calls == [[], []] and [file.name for file in tmp_path.iterdir()] == ['text.txt']
    ids, _ = minigpt.load_tokens(path, tokenizer, tmp_path)
    stories = [story.strip() for story in path.read_text().split('<|endoftext|>')]
    assert len(ids) == 1 + sum(len(story) + 1 for story in stories)


def largest_file(folder):
    """Where the arrays are."""
    files = [path for path in folder.rglob('*') if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_a_damaged_checkpoint_ends_the_run_and_moved_away_lets_it_go_on(
    text, never_stopped, stopped, tmp_path
):
    """The damage changes nothing else: each checkpoint is as it was."""
    newest = stopped / 'checkpoints' / '9'
    path = largest_file(newest)
    path.write_bytes(path.read_bytes()[:1000])
    before = contents(stopped / 'checkpoints')
    arguments = [*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={stopped}']
    run = cli(*arguments)
    assert run.returncode != 0 and run.stderr and 'saved in' not in run.stdout
    assert contents(stopped / 'checkpoints') == before
    newest.rename(tmp_path / 'damaged')
    train(stopped, *arguments)
    assert_same_run(stopped, never_stopped['4,2'])


def test_a_full_disk_fails_the_run_and_leaves_the_older_checkpoints_whole(text, stopped):
    true = state_of(stopped, step=9)
    limited = ['sh', '-c', 'ulimit -f 40; exec "$@"', 'sh', sys.executable, str(SCRIPT)]  # 20 kB
    arguments = [*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={stopped}', '--eval_every=0']
    run = subprocess.run([*limited, *arguments], capture_output=True, text=True, timeout=600)
    assert run.returncode != 0 and 'saved in' not in run.stdout, run.stdout
    assert 'File too large' in run.stderr
    assert saved_steps(stopped) == [3, 6, 9]
    assert_same_arrays(state_of(stopped, step=9), true)


def test_a_run_that_is_not_finite_names_the_step_and_saves_nothing_after_it(text, tmp_path):
    """It is seen at a checkpoint, before any log line. The checkpoints before it are whole."""
    arguments = [*LONG, f'--data={text}', '--mesh=1,1', '--learning_rate=1e30', '--warmup_steps=0']
    arguments += ['--eval_every=0', '--log_every=99', '--checkpoint_every=1']
    run = cli(*arguments, f'--workdir={tmp_path}')
    message = re.fullmatch(r'step (\d): loss .*(nan|inf).*not saved.*', run.stderr.strip())
    assert run.returncode == 1 and message, run.stderr
    last = int(message[1]) - 1
    assert saved_steps(tmp_path) == list(range(1, last + 1))
    assert all(np.isfinite(a).all() for a in state_of(tmp_path, step=last))


def test_a_run_goes_on_on_another_mesh(text, never_stopped, stopped):
    train(stopped, *LONG, f'--data={text}', '--mesh=2,4', '--dropout=0.1')
    assert rows_of(stopped)[:10] == rows_of(never_stopped['4,2'])[:10]  # of steps 0 to 9
    assert_near(rows_of(stopped), rows_of(never_stopped['4,2']))


@pytest.mark.parametrize(
    ('change', 'old', 'new'),
    [
        ('--embed_dim=64', '32', '64'),
        ('--num_heads=4', '8', '4'),
        ('--maxlen=15', '16', '15'),
        ('--feed_forward_dim=64', '32', '64'),
        ('--num_transformer_blocks=2', '1', '2'),
        ('--dropout=0.2', '0.1', '0.2'),
        ('--dtype=float32', 'auto', 'float32'),
        ('--tokenizer=words', 'bytes', 'words'),
        ('--batch_size=8', '16', '8'),
        ('--seed=1', '42', '1'),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(
    change, old, new, text, never_stopped, monkeypatch
):
    workdir = never_stopped['4,2']
    monkeypatch.setattr(minigpt, 'create_model', lambda *_: pytest.fail('it went on'))
    before = contents(workdir)
    name = change[2:].split('=')[0]
    with pytest.raises(minigpt.UserError, match=f'{name} {old} -> {new}'):
        train(workdir, *LONG, f'--data={text}', '--mesh=4,2', change)
    assert contents(workdir) == before


def test_a_run_is_not_resumed_with_another_text(never_stopped, tmp_path, monkeypatch):
    workdir = never_stopped['4,2']
    monkeypatch.setattr(minigpt, 'create_model', lambda *_: pytest.fail('it went on'))
    other = write_text(tmp_path / 'text.txt', seed=1)
    with pytest.raises(minigpt.UserError, match=r'data \w+ -> \w+'):
        train(workdir, *LONG, f'--data={other}', '--mesh=4,2')


def test_a_run_of_words_is_resumed_with_the_same_words_only(text, tmp_path):
    arguments = [*LONG, f'--data={text}', '--tokenizer=words', '--max_steps=4', '--mesh=1,1']
    train(tmp_path, *arguments)
    rows = train(tmp_path, *arguments, '--max_steps=6')
    assert [row['step'] for row in rows if row['loss']] == list('123456')
    path = tmp_path / 'checkpoints' / '6' / 'settings' / 'metadata'
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {'words': settings['words'][::-1]}))
    with pytest.raises(minigpt.UserError, match='words'):
        train(tmp_path, *arguments, '--max_steps=7')


def test_a_finished_run_does_nothing_and_goes_on_with_more_steps(text, never_stopped, tmp_path):
    arguments = [*LONG, f'--data={text}', '--mesh=4,2']
    shutil.copytree(never_stopped['4,2'], tmp_path / 'run')
    before = contents(tmp_path / 'run' / 'checkpoints')
    train(tmp_path / 'run', *arguments)
    assert contents(tmp_path / 'run' / 'checkpoints') == before
    assert rows_of(tmp_path / 'run') == rows_of(never_stopped['4,2'])
    train(tmp_path / 'run', *arguments, '--max_steps=23')
    assert saved_steps(tmp_path / 'run') == [*SAVED, 21, 23]
    assert rows_of(tmp_path / 'run')[:23] == rows_of(never_stopped['4,2'])


def start_pair(text, workdir):
    """Two processes that train together, four devices each."""
    with socket.socket() as free:
        free.bind(('localhost', 0))
        address = f'localhost:{free.getsockname()[1]}'
    arguments = [*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={workdir}', '--eval_every=20']
    arguments += ['--num_processes=2', f'--coordinator={address}']
    return [start(*arguments, f'--process_id={i}') for i in range(2)]


def end_of_pair(pair):
    """[(stdout, stderr), ...]; none is left behind."""
    try:
        return [end_of(process) for process in pair]
    finally:
        for process in pair:
            process.kill()


def test_two_processes_are_one_and_a_signal_to_one_stops_both(text, never_stopped, tmp_path):
    pair = start_pair(text, tmp_path)
    wait_for_steps(pair[0], tmp_path)
    pair[1].send_signal(signal.SIGTERM)
    (out, err), (silent, _) = end_of_pair(pair)
    assert [process.returncode for process in pair] == [143, 143], err
    assert 'step' in out and not re.search('step|mesh|param|save', silent)  # Gloo adds its own
    step = max(saved_steps(tmp_path))
    assert f'step {step} of 20: saved in' in out and step < 20
    train(tmp_path, *LONG, f'--data={text}', '--mesh=4,2', '--eval_every=20')  # one goes on
    true = [row for row in rows_of(never_stopped['4,2']) if row['loss'] or row['step'] in '0 20']
    assert_near(rows_of(tmp_path), true)
    one = state_of(never_stopped['4,2'])
    for a, b in zip(state_of(tmp_path), one, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


slow = pytest.mark.skipif('MINIGPT_SLOW' not in os.environ, reason='MINIGPT_SLOW=1 runs it')


def wait_for_phase(phase, rng, process, workdir):
    """Waits for a random moment of a phase."""
    before = len(saved_steps(workdir)) if workdir.joinpath('checkpoints').exists() else 0
    began = time.time()
    metrics = workdir / 'metrics.csv'
    if phase == 'any':  # imports, data, compilation
        until = time.time() + rng.uniform(0, 8)
        wait_until(process, lambda: time.time() > until)
    elif phase == 'save':  # the next one or the one after it
        more = before + rng.randint(0, 1)
        wait_until(process, (workdir / 'checkpoints').exists)
        wait_until(process, lambda: len(saved_steps(workdir)) >= more and half_saved(workdir))
        time.sleep(rng.uniform(0, 0.05))
    else:  # a step or an evaluation
        wait_until(process, lambda: metrics.exists() and metrics.stat().st_mtime > began)
        time.sleep(rng.uniform(0, 0.2))


@slow
@pytest.mark.parametrize('mesh', ['1,1', '4,2', '2,4'])
def test_a_run_killed_at_random_moments_loses_nothing(mesh, text, never_stopped, tmp_path):
    arguments = [*LONG, f'--data={text}', f'--mesh={mesh}', f'--workdir={tmp_path}']
    rng = random.Random(mesh)
    for phase in ('any', 'save', 'step'):
        process = start(*arguments)
        wait_for_phase(phase, rng, process, tmp_path)
        process.kill()
        assert process.wait() == -signal.SIGKILL  # it was still at work
    train(tmp_path, *arguments)
    assert not half_saved(tmp_path)
    assert_same_run(tmp_path, never_stopped[mesh])


@slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('phase', ['compile', 'step', 'evaluation', 'save'])
def test_a_signal_in_any_phase_stops_politely(number, phase, text, never_stopped, tmp_path):
    arguments = [*LONG, f'--data={text}', '--mesh=2,4', f'--workdir={tmp_path}']
    process = start(*arguments)
    words = {'compile': '--- step 0', 'step': 'step 6/', 'evaluation': 'step 10/'}
    for line in process.stdout:
        if line.startswith(words.get(phase, 'step 12/')):
            break
    if phase == 'save':
        assert wait_until(process, lambda: half_saved(tmp_path)), process.communicate()
    process.send_signal(number)
    _, err = end_of(process)
    assert process.returncode == 128 + number and 'Traceback' not in err, err
    assert 'stopping after this step' in err
    train(tmp_path, *arguments)
    assert_same_run(tmp_path, never_stopped['2,4'])


@slow
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_ends_the_other_and_both_go_on(victim, text, never_stopped, tmp_path):
    pair = start_pair(text, tmp_path)
    wait_for_steps(pair[0], tmp_path)
    pair[victim].kill()
    end_of(pair[1 - victim], seconds=300)
    assert pair[1 - victim].returncode != 0
    pair = start_pair(text, tmp_path)
    (_, err), _ = end_of_pair(pair)
    assert [process.returncode for process in pair] == [0, 0], err
    true = [row for row in rows_of(never_stopped['4,2']) if row['loss'] or row['step'] in '0 20']
    assert_near(rows_of(tmp_path), true)


# ---- The command line ----------------------------------------------------------------------------
BAD = [
    (['--data=nowhere.txt'], 'nowhere.txt'),
    (['--data=', '--tokenizer=bytes'], 'directory'),
    ([f'--data={SCRIPT.parent}', '--tokenizer=bytes'], 'directory'),
    (['--tokenizer=gpt7'], '--tokenizer=gpt7'),
    (['--mesh=4x2'], '--mesh=4x2 is not batch,model'),
    (['--mesh=3'], '--mesh=3 is not batch,model'),
    (['--mesh=-1,-1'], '--mesh=-1,-1 is not batch,model'),
    (['--mesh=0,8'], '--mesh=0,8 is not batch,model'),
    (['--mesh=100000,1'], '--mesh=100000,1 does not fit'),
    (['--mesh=1,99999999999'], '--mesh=1,99999999999 does not fit'),
    (['--mesh=4,2', '--batch_size=145'], '--batch_size=145 .*4: use 148'),
    (['--mesh=4,2', '--batch_size=8', '--accum_steps=3'], '--batch_size=8 .*12: use 12'),
    (['--mesh=1,8', '--num_heads=4'], '--num_heads=4 is not divisible by model axis=8: use 8'),
    (['--mesh=1,8', '--feed_forward_dim=20'], '--feed_forward_dim=20 .*=8: use 24'),
    (['--mesh=1,3', '--num_heads=3', '--embed_dim=33', '--feed_forward_dim=33'], '--mesh=1,3'),
    (['--num_heads=5'], '--embed_dim=32 is not divisible by --num_heads=5: use 35'),
    ([f'--workdir={SCRIPT}'], f'{SCRIPT.name}'),
    (['--batch_size=100000'], 'windows of 16 .*--batch_size=100000'),
    (['--prompt=Once upon a time there', '--tokenizer=bytes'], '--prompt of 23 tokens .*maxlen=16'),
    (['--mode=sample'], 'no checkpoint'),
    (['--mode=sample', '--workdir=nowhere'], 'nowhere'),
    (['--mode=sample', '--mesh=5'], '--mesh=5 is not batch,model'),
]


@pytest.mark.parametrize(('arguments', 'message'), BAD)
def test_bad_input_is_one_line_before_anything_compiles(arguments, message, tmp_path, monkeypatch):
    """In a notebook it is an exception. sys.exit(line) prints the line and ends with status 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minigpt, 'create_model', lambda *_: pytest.fail('it went on'))
    arguments = [*TINY, f'--workdir={tmp_path / "run"}', '--prompt=One', *arguments]
    parse(*arguments)
    with pytest.raises((minigpt.UserError, OSError), match=message):
        (minigpt.sample if '--mode=sample' in arguments else minigpt.train)()
    parse(*arguments)
    with pytest.raises(SystemExit, match=message) as error:
        minigpt.main([])
    assert isinstance(error.value.code, str) and '\n' not in error.value.code


@pytest.mark.parametrize('arguments', [['--mesh=100000,1'], ['--mode=sample']])
def test_bad_input_is_all_that_a_process_prints_on_stderr(arguments, tmp_path):
    run = cli(*TINY, *arguments, cwd=tmp_path)
    assert run.returncode == 1 and run.stderr.count('\n') == 1, run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'content', ['', '<|endoftext|>' * 9, '\n \n<|endoftext|>\n', 'one short story']
)
@pytest.mark.parametrize('tokenizer', ['bytes', 'words'])
def test_a_text_with_too_little_to_train_on_is_refused_with_both_numbers(
    content, tokenizer, tmp_path
):
    path = tmp_path / 'text.txt'
    path.write_text(content)
    arguments = [f'--data={path}', '--batch_size=8', f'--tokenizer={tokenizer}', '--mesh=1,1']
    with pytest.raises(minigpt.UserError, match=r'\d windows of 16 .*--batch_size=8: lower'):
        train(tmp_path / 'run', *arguments, '--prompt=a')


@pytest.mark.parametrize('content', ['naïve'.encode('latin-1') * 200, 'naïve'.encode('utf-16')])
@pytest.mark.parametrize('tokenizer', ['bytes', 'words'])
def test_a_file_that_is_not_utf8_is_one_line_that_names_it(content, tokenizer, tmp_path):
    path = tmp_path / 'text.txt'
    path.write_bytes(content)
    parse(
        *TINY,
        f'--workdir={tmp_path / "run"}',
        f'--data={path}',
        f'--tokenizer={tokenizer}',
        '--prompt=a',
    )
    with pytest.raises(SystemExit, match='text.txt is not UTF-8') as error:
        minigpt.main([])
    assert '\n' not in error.value.code
    assert {file.name for file in tmp_path.iterdir()} == {'text.txt', 'run'}


@pytest.mark.parametrize('place', ['run', 'run/checkpoints', 'run/metrics.csv/x'])
def test_a_file_or_folder_in_the_way_is_one_line(text, tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / place).write_text('mine')
    parse(*LONG, f'--data={text}', '--mesh=1,1', f'--workdir={tmp_path / "run"}')
    with pytest.raises(SystemExit, match='Not a directory|File exists|Is a directory') as error:
        minigpt.main([])
    assert str(tmp_path / 'run') in error.value.code
    assert '\n' not in error.value.code and (tmp_path / place).read_text() == 'mine'


def test_a_text_is_found_by_link_home_and_spaces_and_a_folder_nobody_may_write_is_left_alone(
    tmp_path, monkeypatch
):
    folder = tmp_path / 'my texts'
    folder.mkdir()
    (tmp_path / 'link.txt').symlink_to(write_text(folder / 'a b.txt'))
    monkeypatch.setenv('HOME', str(tmp_path))
    arguments = ['--batch_size=8', '--max_steps=1', '--mesh=1,1', '--eval_every=0']
    for data in ('my texts/a b.txt', 'link.txt'):  # the same text: the second finds it finished
        train('~/run', f'--data=~/{data}', *arguments)
    assert saved_steps(tmp_path / 'run') == [1] and not pathlib.Path('~').exists()
    for made in [*folder.glob('*.tokens'), *tmp_path.glob('*.tokens')]:
        made.unlink()
    monkeypatch.setattr(os, 'access', lambda *_: False)  # root may write everywhere
    train(tmp_path / 'run', f'--data={folder / "a b.txt"}', *arguments)
    assert list((tmp_path / 'run').glob('*.tokens')) and not list(folder.glob('*.tokens'))


def test_a_tokenizer_that_cannot_be_fetched_says_what_works_without_a_network(monkeypatch):
    def fail(name):
        raise OSError('no route to host')  # as requests, which tiktoken uses, raises its own

    monkeypatch.setattr(tiktoken, 'get_encoding', fail)
    with pytest.raises(minigpt.UserError, match='TIKTOKEN_CACHE_DIR') as error:
        minigpt.load_tokenizer('gpt2')
    assert '\n' not in str(error.value) and '--tokenizer=gpt2' in str(error.value)
    assert 'no route to host' in str(error.value)


def test_a_program_error_keeps_its_traceback(monkeypatch):
    class Wrong(Exception):
        pass

    for error in (RuntimeError('two\nlines'), ValueError('of NumPy'), KeyError('name'), Wrong()):

        def fail(error=error):
            raise error

        monkeypatch.setattr(minigpt, 'train', fail)
        parse()
        with pytest.raises(type(error)) as found:
            minigpt.main([])
        assert found.value is error
        assert found.traceback[-1].name == 'fail'


def test_a_device_without_memory_is_one_line(monkeypatch):
    def fail():
        raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory\nAllocator report:')

    monkeypatch.setattr(minigpt, 'train', fail)
    parse()
    with pytest.raises(SystemExit) as error:
        minigpt.main([])
    assert error.value.code == 'RESOURCE_EXHAUSTED: Out of memory'


def test_flags_of_several_processes_that_do_not_fit_are_one_line(tmp_path):
    run = cli(*TINY, '--num_processes=2', '--process_id=1', cwd=tmp_path)  # no --coordinator
    assert run.returncode == 1 and run.stderr.count('\n') == 1, run.stderr


@pytest.mark.parametrize(
    'argument',
    [
        '--bath_size=3',
        '--batch_size=0',
        '--batch_size=many',
        '--dropout=1.5',
        '--top_k=-1',
        '--temperature=-0.5',
        '--seed=4294967296',
        '--maxlen=1',
        '--learning_rate=-1',
        '--mode=write',
        '--dtype=int8',
    ],
)
def test_a_flag_that_is_unknown_or_out_of_range_is_refused_by_name(argument):
    with pytest.raises(minigpt.flags.Error, match=argument[2:].split('=')[0]):
        parse(argument)


def test_a_stray_argument_is_refused_by_name():
    parse()
    with pytest.raises(minigpt.app.UsageError, match='mesh=4,2'):
        minigpt.main(['minigpt.py', 'mesh=4,2'])


def test_the_command_line_refuses_what_it_does_not_know_and_leaves_nothing(tmp_path):
    run = cli('--batch_size=8', 'mesh=4,2', cwd=tmp_path)
    assert run.returncode == 1 and 'mesh=4,2' in run.stdout + run.stderr
    assert 'Traceback' not in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('arguments', 'steps'),
    [
        (['--batch_size=144'], 100),
        (['--batch_size=144', '--num_epochs=1'], 2048 // 144),
        (['--batch_size=144', '--num_epochs=9'], 9 * 2048 // 144),
        (['--batch_size=144', '--max_steps=7'], 7),
        (['--batch_size=8'], 2048 // 8),
        ([], 2048 // 4),
    ],
)
def test_the_grammar_trains_long_enough_to_be_learned_unless_it_is_told_otherwise(
    arguments, steps, tmp_path
):
    """2,048 stories of 64 tokens, each a window, are trained on; an epoch may be too short."""
    parse('--data=grammar', '--mesh=1,1', f'--workdir={tmp_path}', *arguments)
    run = minigpt.Run()
    assert minigpt.FLAGS.max_steps == steps
    assert run.training.shape == (2048, 65)
    assert (tmp_path / 'grammar.txt').read_text().count('<|endoftext|>') == 2048 + 64


def test_another_text_is_seen_once_and_num_epochs_times(tmp_path):
    """21 stories of 16 tokens, of which the last tenth, rounded up to 3, is held out."""
    path = tmp_path / 'text.txt'
    path.write_text('<|endoftext|>'.join(['a' * 15] * 21))
    arguments = [*TINY, f'--data={path}', '--tokenizer=bytes', '--prompt=a', '--batch_size=4']
    for epochs, steps in [([], 18 // 4), (['--num_epochs=5'], 5 * 18 // 4)]:
        parse(*arguments, '--mesh=1,1', f'--workdir={tmp_path / "run"}', *epochs)
        minigpt.Run()
        assert minigpt.FLAGS.max_steps == steps


def test_the_defaults_of_the_grammar_are_only_for_the_grammar(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ('tokenizer', 'maxlen', 'batch_size')

    def flags_of(*arguments):
        parse(*arguments, '--mesh=1,1')
        minigpt.Run()
        return tuple(minigpt.FLAGS[name].value for name in names)

    assert flags_of() == ('words', 64, 4)  # TinyStories-train.txt is not there
    assert flags_of('--maxlen=32', '--batch_size=3') == ('words', 32, 3)
    assert flags_of(f'--data={text}', '--tokenizer=bytes', '--batch_size=2') == ('bytes', 256, 2)
    write_text(tmp_path / 'TinyStories-train.txt', stories=4000)
    assert flags_of('--tokenizer=words') == ('words', 256, 144)
    assert flags_of('--data=grammar') == ('words', 64, 4)
    parse('--mesh=8,1', '--data=grammar')
    minigpt.Run()
    assert minigpt.FLAGS.batch_size == 8  # a multiple of the batch axis


def test_a_default_workdir_is_named_after_text_sizes_and_seed(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link = tmp_path / 'link.txt'
    link.symlink_to(text)
    parse(*TINY, f'--data={link}', '--tokenizer=bytes', '--prompt=a', '--batch_size=8', '--seed=3')
    assert minigpt.Run().workdir == pathlib.Path('runs/text-1x32-b8-s3')


def sampled(capfd, *arguments):
    """(stdout, stderr) of --mode=sample."""
    capfd.readouterr()
    parse('--mode=sample', '--mesh=1,1', '--prompt=the', '--max_new_tokens=4', *arguments)
    minigpt.main([])
    return capfd.readouterr()


def test_the_newest_run_that_has_a_checkpoint_writes(never_stopped, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    runs = [pathlib.Path('runs') / name for name in ('b', 'c', 'a')]  # from the oldest on
    for age, run in enumerate(runs):
        shutil.copytree(never_stopped['4,2'], run)
        for step in saved_steps(run):
            when = 1e9 + 1000 * age + step
            os.utime(run / 'checkpoints' / str(step), (when, when))
    shutil.rmtree(runs[1] / 'checkpoints' / '20')  # so that it differs from the others
    (tmp_path / 'runs' / 'failed' / 'checkpoints').mkdir(parents=True)  # before its first save
    (tmp_path / 'runs' / 'notes.txt').write_text('mine')
    out, err = sampled(capfd)
    assert out.startswith('the') and 'runs' not in out
    assert 'runs/a, step 20' in err
    shutil.rmtree(runs[2])
    assert 'runs/c, step 18' in sampled(capfd)[1]
    assert 'runs/b, step 20' in sampled(capfd, '--workdir=runs/b')[1]


def test_a_run_that_was_killed_in_its_first_save_is_not_chosen_to_write(
    never_stopped, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(never_stopped['4,2'], 'runs/whole')
    half = tmp_path / 'runs' / 'killed' / 'checkpoints' / '3.orbax-checkpoint-tmp'
    shutil.copytree('runs/whole/checkpoints/3', half)
    os.utime(half)
    assert 'runs/whole, step 20' in sampled(capfd)[1]


def before_end(ids, end):
    return ids[: ids.index(end)] if end in ids else ids


def test_a_text_is_written_by_the_model_of_the_run_whatever_the_flags_are(
    never_stopped, capfd, tmp_path
):
    """At temperature 0 it is what whole passes of the restored model find likeliest."""
    workdir = never_stopped['4,2']
    arguments = ['--temperature=0', f'--workdir={workdir}', '--max_new_tokens=8', '--embed_dim=64']
    texts = {sampled(capfd, *arguments, f'--mesh={mesh}')[0] for mesh in ('1,1', '4,2')}
    model, _ = restored_state(workdir)
    ids = [256, *b'the']
    while len(ids) < 12:
        row = np.array([ids + [0] * (16 - len(ids))], np.int32)
        ids.append(int(logits(model, row)[0, len(ids) - 1, :257].argmax()))
    written = bytes(before_end(ids[1:], 256)).decode('utf-8', 'replace')
    assert texts == {written + '\n'}


def test_the_script_trains_samples_and_compiles_its_step_once(tmp_path, monkeypatch, capfd):
    arguments = [*TINY, '--max_steps=12', '--eval_every=6', '--mesh=2,2', '--batch_size=4']
    run = cli(
        *arguments,
        '--profile_steps=3',
        cwd=tmp_path,
        JAX_DUMP_IR_TO=str(tmp_path / 'ir'),
        HTTPS_PROXY='http://127.0.0.1:9',  # no network
        TIKTOKEN_CACHE_DIR='',
        PYTHONWARNINGS='error:::__main__,ignore:builtin type:DeprecationWarning',  # JAX's profiler
    )
    assert run.returncode == 0, run.stderr
    assert len(list((tmp_path / 'ir').glob('*jit_train_step*compile*'))) == 1
    assert 'Traceback' not in run.stderr and 'donated' not in run.stderr
    workdir = tmp_path / 'runs' / 'grammar-1x32-b4-s42'
    rows = rows_of(workdir)
    assert [row['step'] for row in rows] == ['0', '6', '10', '12', '12']
    assert (workdir / 'loss.png').read_bytes().startswith(b'\x89PNG')
    assert float(rows[-1]['val_loss']) > 10 * math.log(8) / 64  # which no model can undercut
    assert '3 steps traced' in run.stdout and 'entropy' in run.stdout
    monkeypatch.chdir(tmp_path)
    out, err = sampled(capfd, '--prompt=One naïve day', '--num_samples=2')
    assert out.startswith('One naïve day') and out.count('One naïve day') == 2
    assert 'runs' not in out and 'runs/grammar-1x32-b4-s42, step 12' in err


def test_a_profile_that_does_not_fit_into_the_run_is_refused(text, tmp_path):
    parse(*LONG, f'--data={text}', '--mesh=1,1', f'--workdir={tmp_path}', '--profile_steps=16')
    with pytest.raises(SystemExit, match='--profile_steps=16 .*--max_steps=21 '):
        minigpt.main([])


def test_flags_may_stand_in_a_file(tmp_path):
    (tmp_path / 'flags.txt').write_text('--mesh=4,2\n# a comment\n--batch_size=16\n')
    parse(f'--flagfile={tmp_path / "flags.txt"}', '--batch_size=8')
    assert (minigpt.FLAGS.mesh, minigpt.FLAGS.batch_size) == ('4,2', 8)


# ---- The readme ----------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def readme():
    return SCRIPT.with_name('README.md').read_text()


def test_the_commands_of_the_readme_run_in_its_order(readme, tmp_path, monkeypatch, capsys):
    """As they stand, after settings that make small what they leave to the defaults."""
    small = ['--embed_dim=32', '--feed_forward_dim=32', '--num_transformer_blocks=1']
    # 8 devices are set up here, of which -1 would be all
    small += ['--maxlen=32', '--tokenizer=words', '--mesh=1,1']
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / 'my.txt')
    commands = re.findall(r'^    (wget|python minigpt.py) ?(.*)$', readme, re.M)
    assert len(commands) >= 8
    for program, command in commands:
        if program == 'wget':
            write_text(tmp_path / command.split('/')[-1], stories=1000)
            continue
        arguments = shlex.split(command, comments=True)
        steps = 30 if 'profile' in command else 2
        parse(*small, f'--max_steps={steps}', *arguments)
        minigpt.SIGNALS.clear()
        minigpt.main([])
        out = capsys.readouterr().out
        assert 'Once upon a time' in out if 'sample' in command else 'saved in runs/' in out, (
            command
        )
        assert ('steps traced' in out) == ('profile' in command)


def test_flags_and_names_that_the_readme_gives_exist(readme):
    flags = set(minigpt.FLAGS)
    text = re.sub(r'^    (?!python minigpt|run).*', '', readme, flags=re.M)
    named = set(re.findall(r'--(\w+)\b', text))
    assert len(named) > 20 and named - flags <= {'logdir'}, named - flags
    forks = readme[readme.index('## Change it') : readme.index('## Profile')]
    code = set(re.findall(r'\w+', SCRIPT.read_text()))
    quoted = [words for words in re.findall('`([^`]+)`', forks) if '--' not in words]
    names = set(re.findall(r'\w+', ' '.join(quoted)))
    new = {'RMSNorm', 'gate', 'silu', 'lion', 'cumsum', 'softmax', 'py'}
    assert len(names) > 20 and names - code <= new, names - code
    sections = re.findall(r'^# ---- ([\w ]+):', SCRIPT.read_text(), re.M)
    assert ', '.join(sections) in ' '.join(forks.split())
    assert all(re.search(rf'^    {name}  ', minigpt.__doc__, re.M) for name in sections)


@pytest.fixture(scope='module')
def unchanged():
    return run_steps('1,1')[0]


GATE = "        self.gate = weight(rngs, (D, F), 'batch', 'model')\n        self.down ="
OLD_UP = "self.norm2(x_BTD), self.up, P('batch', None, 'model'))"
GATED = (
    f"{OLD_UP}\n        up_BTF *= nnx.silu(project('btd,df->btf', {OLD_UP.replace('up', 'gate')})"
)


@pytest.mark.parametrize(
    'changes',
    [
        [('nnx.LayerNorm(', 'nnx.RMSNorm(')],
        [('optax.adamw(', 'optax.lion('), (' b2=0.95,', '')],
        [('        self.down =', GATE), (OLD_UP, GATED)],
    ],
    ids=['RMSNorm', 'Lion', 'gated MLP'],
)
def test_forks_that_the_readme_names_learn_the_same_on_two_meshes(changes, unchanged, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], 'minigpt', fork(*changes))
    found, again = run_steps('1,1')[0], run_steps('4,2')[0]
    assert not np.allclose(
        found[:, 0], unchanged[:, 0], atol=1e-4
    )  # it is another model or optimizer
    np.testing.assert_allclose(found[:, 0], again[:, 0], atol=1e-5)
