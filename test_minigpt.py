"""What minigpt promises, each promise checked against something that is not minigpt's code.

    python -m pytest
    MINIGPT_SLOW=1 python -m pytest   # and the full matrix of kills and signals

Eight devices are simulated on the CPU and the models are tiny; no network is used.
"""
import csv
import gzip
import hashlib
import json
import logging
import math
import os
import pathlib
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types

# The programs are tiny and compiling them is what takes time, so each is compiled once and lightly.
CACHE = tempfile.TemporaryDirectory()
os.environ |= {'XLA_FLAGS': '--xla_backend_optimization_level=0', 'JAX_PLATFORMS': 'cpu',
               'JAX_COMPILATION_CACHE_DIR': CACHE.name, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}

import jax

jax.config.update('jax_num_cpu_devices', 8)

from flax import nnx
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import requests
import tiktoken

import minigpt

logging.getLogger('asyncio').setLevel('CRITICAL')   # Orbax's threads tell it of the damaged files
SCRIPT = pathlib.Path(minigpt.__file__)
MESHES = ['1,1', '8,1', '4,2', '2,4', '1,8']
VOCAB = 300   # padded to 384
SIZES = dict(maxlen=16, embed_dim=32, num_heads=8, feed_forward_dim=32, num_transformer_blocks=1)
TINY = [f'--{name}={value}' for name, value in SIZES.items()]


def tiny_model(mesh='1,1', seed=0, vocab_size=VOCAB, **changes):
    minigpt.create_mesh(mesh)
    settings = dict(SIZES, dropout=0.0, dtype='float32') | changes
    return minigpt.create_model(seed, vocab_size, **settings)


def random_ids(shape, vocab_size=VOCAB, seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def logits(model, ids_BT):
    """Logits by whole matrices: (B, T, V), real vocabulary only."""
    x_BTD, _ = minigpt.gather(model)(minigpt.to_devices(ids_BT))
    return np.asarray(x_BTD) @ np.asarray(model.output_layer[...])[:VOCAB].T


def numpy_losses(model, ids_BS, vocab_size=VOCAB):
    """Cross-entropy of each next token, by whole logits in float64: (B, T) nats."""
    z = logits(model, ids_BS[:, :-1])[..., :vocab_size].astype(np.float64)
    B, T, _ = z.shape
    return [[np.log(np.exp(z[b, t]).sum()) - z[b, t, ids_BS[b, t + 1]] for t in range(T)] for b in range(B)]


def run_steps(mesh, steps=4, batch_size=8, accum_steps=1, dropout=0.0, **changes):
    """[(loss, grad_norm), ...] and the trained model of a few steps on random windows."""
    model = tiny_model(mesh, dropout=dropout, **changes)
    optimizer, _ = minigpt.create_optimizer(model, 1e-2, 2, steps, weight_decay=0.1, clip_norm=1.0)
    out = []
    for step in range(steps):
        ids_BS = minigpt.to_devices(random_ids((batch_size, SIZES['maxlen'] + 1), seed=step))
        model, optimizer, metrics = minigpt.train_step(
            model, optimizer, ids_BS, jax.random.key(7), accum_steps)
        out.append((float(metrics['loss']), float(metrics['grad_norm'])))
    return np.array(out), model


def fork(*changes):
    """The script with some texts replaced, as a module beside it."""
    source = SCRIPT.read_text()
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    module = types.ModuleType('fork')
    exec(compile(re.sub(r'^flags.DEFINE.*', '', source, flags=re.M), 'fork', 'exec'), module.__dict__)
    return module


def parse(*arguments):
    """The flags as `main` sees them."""
    flags = minigpt.flags.FLAGS
    flags.unparse_flags()
    for name in flags.flags_by_module_dict()['minigpt']:
        name.unparse()
    minigpt.parse_flags(['minigpt.py', *arguments])
    return flags


def train(workdir, *arguments):
    minigpt.train(parse(*TINY, f'--workdir={workdir}', '--tokenizer=bytes', '--prompt=the', *arguments))
    return list(csv.DictReader(open(pathlib.Path(workdir).expanduser() / 'metrics.csv')))


def cli(*arguments, cwd=None, **env):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], cwd=cwd, capture_output=True,
                          text=True, timeout=600, env=os.environ | env)


def start(*arguments):
    """The script as a process of its own, whose output collects in pipes."""
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def wait_until(process, happened):
    """Waits for a condition while the process runs; False if it ended without."""
    deadline = time.time() + 300
    while not happened():
        if process.poll() is not None or time.time() > deadline:
            return False
        time.sleep(0.001)
    return True


def write_text(path, stories=60, seed=0):
    rng = np.random.default_rng(seed)
    words = 'the cat sat on a mat and saw one red ball near old trees'.split()
    text = '<|endoftext|>'.join(' '.join(rng.choice(words, 12)) + '.\n' for _ in range(stories))
    path.write_text(text, encoding='utf-8')
    return path


# ---- The model ----------------------------------------------------------------------------------

def numpy_forward(model, ids_T):
    """The whole model for one row, in plain float64 NumPy loops over heads: (T, D)."""
    get = lambda variable: np.asarray(variable[...], np.float64)

    def norm(layer, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + 1e-6)
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
                x[t] += (weights @ v[:t + 1]) @ out[head]
        x = x + np.maximum(norm(block.norm2, x) @ get(block.up), 0) @ get(block.down)
    return norm(model.norm, x)


@pytest.mark.parametrize('mesh', ['1,1', '4,2'])
def test_the_forward_pass_is_that_of_plain_numpy(mesh):
    model = tiny_model(mesh)
    # larger weights than at the start, so that attention is far from uniform
    model = jax.tree.map(lambda a: a * 8 if a.ndim > 1 else a, model)
    ids_BT = random_ids((4, 16))
    x_BTD = np.asarray(minigpt.gather(model)(minigpt.to_devices(ids_BT))[0])
    for row in range(2):
        np.testing.assert_allclose(x_BTD[row], numpy_forward(model, ids_BT[row]), atol=2e-4)


def test_a_later_token_changes_nothing_before_it_and_an_earlier_one_does():
    model = tiny_model()
    ids = random_ids((1, 16))
    changed = ids.copy()
    changed[0, 9] = (changed[0, 9] + 1) % VOCAB
    before, after = logits(model, ids)[0], logits(model, changed)[0]
    np.testing.assert_array_equal(before[:9], after[:9])
    assert (np.abs(before[9:] - after[9:]).max(-1) > 1e-6).all()


def test_parameters_are_float32_and_split_over_the_whole_mesh():
    model = tiny_model('4,2')
    assert dict(jax.sharding.get_mesh().shape) == {'batch': 4, 'model': 2}
    part = lambda a: a[...].addressable_shards[0].data.shape
    assert part(model.output_layer) == (384 // 2, 32 // 4)
    assert part(model.embedding_layer.token_emb) == (384 // 4, 32 // 2)
    block = model.transformer_blocks[0]
    assert part(block.qkv) == (32 // 4, 3, 8 // 2, 4) and part(block.out) == (8 // 2, 4, 32 // 4)
    assert part(block.up) == (32 // 4, 32 // 2) and part(block.down) == (32 // 2, 32 // 4)
    optimizer, _ = minigpt.create_optimizer(model, 1e-3, 0, 9, 0.1, 1.0)
    whole = sum(a.size for a in jax.tree.leaves(model))
    held = sum(a.addressable_shards[0].data.size for a in jax.tree.leaves((model, optimizer)))
    assert held < 3 * whole / 8 * 1.2   # parameters and two moments, an eighth on each device
    assert {a.dtype for a in jax.tree.leaves(model)} == {jnp.dtype('float32')}


def test_bfloat16_compute_stays_near_float32():
    exact, _ = run_steps('1,1', steps=2)
    coarse, _ = run_steps('1,1', steps=2, dtype='bfloat16')
    np.testing.assert_allclose(coarse[:, 0], exact[:, 0], atol=0.02)


# ---- The loss and the step ----------------------------------------------------------------------

@pytest.mark.parametrize('mesh', MESHES)
def test_fused_loss_and_gradients_are_those_of_optax_on_whole_logits(mesh):
    minigpt.create_mesh(mesh)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 12, 32)), rng.normal(size=(384, 32))
    x, w, y = x.astype(np.float32), w.astype(np.float32), random_ids((8, 12))

    def whole(x, w):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w[:VOCAB].T, y).mean()

    x_BTD, y_BT = jax.device_put(x, P('batch', None, None)), jax.device_put(y, P('batch', None))
    w_VD = jax.device_put(w, P('model', None))
    fused = jax.jit(jax.value_and_grad(
        lambda x, w: 3 * minigpt.cross_entropy(x, w, y_BT, VOCAB) / y.size, argnums=(0, 1)))
    loss, grads = fused(x_BTD, w_VD)
    true_loss, true_grads = jax.value_and_grad(whole, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(loss, 3 * true_loss, rtol=1e-6)
    for found, true in zip(grads, true_grads):
        np.testing.assert_allclose(found, 3 * np.asarray(true), atol=1e-6)
    assert not np.asarray(grads[1])[VOCAB:].any()   # padded rows learn nothing


def test_loss_is_the_numpy_cross_entropy_of_each_next_token():
    model = tiny_model()
    ids_BS = random_ids((2, 17))
    true = numpy_losses(model, ids_BS)
    loss = jax.jit(minigpt.loss_fn)(minigpt.gather(model), minigpt.to_devices(ids_BS))
    np.testing.assert_allclose(loss, np.mean(true), rtol=1e-6)
    found_B = minigpt.eval_step(model, minigpt.to_devices(ids_BS))
    np.testing.assert_allclose(found_B, np.mean(true, axis=1), rtol=1e-6)


def test_the_untrained_loss_is_near_ln_of_the_real_vocabulary():
    (loss, _), = run_steps('1,1', steps=1)[0]
    assert abs(loss - math.log(VOCAB)) < 0.1


def test_losses_are_the_same_on_every_mesh():
    losses = {mesh: run_steps(mesh)[0] for mesh in MESHES}
    for mesh, found in losses.items():
        np.testing.assert_allclose(found, losses['1,1'], atol=1e-5, err_msg=mesh)
    assert losses['1,1'][0, 0] != losses['1,1'][1, 0]


def test_in_float64_thirty_steps_are_the_same_on_every_mesh_to_twelve_digits(monkeypatch):
    """Meshes differ by the order of additions alone: with more digits the difference goes away."""
    monkeypatch.setattr(sys.modules[__name__], 'minigpt', fork(
        ('jnp.float32', 'jnp.float64'), ('dtype=dtype, rngs=rngs)\n', 'dtype=dtype, param_dtype=dtype, rngs=rngs)\n')))
    with jax.enable_x64(True):
        run = lambda mesh, n=1: run_steps(mesh, 30, accum_steps=n, dtype='float64')[0]
        true = run('1,1')
        for found in [run('8,1'), run('4,2'), run('2,4', 4), run('1,8', 2)]:
            np.testing.assert_allclose(found, true, rtol=1e-12)
    assert true.dtype == np.float64 and len(np.unique(true)) == true.size


@pytest.mark.parametrize('mesh', ['1,1', '4,2'])
def test_micro_batches_change_neither_loss_nor_gradient(mesh):
    one, _ = run_steps(mesh, steps=3, batch_size=16)
    four, _ = run_steps(mesh, steps=3, batch_size=16, accum_steps=4)
    np.testing.assert_allclose(four, one, atol=1e-5)


def test_the_step_is_clipped_adamw_on_the_written_schedule():
    model = tiny_model()
    ids_BS = random_ids((4, 17))
    peak, warmup, total, decay = 0.01, 3, 8, 0.1
    rates = [peak * (step + 1) / (warmup + 1) if step < warmup else
             peak * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2)
             for step in range(total)]
    optimizer, schedule = minigpt.create_optimizer(model, peak, warmup, total, decay, clip_norm=0.05)
    np.testing.assert_allclose([schedule(step) for step in range(total)], rates, rtol=1e-5)

    ids_BS = minigpt.to_devices(ids_BS)
    grad = jax.jit(jax.grad(lambda model: minigpt.loss_fn(minigpt.gather(model), ids_BS)))
    p = [np.asarray(a, np.float64) for a in jax.tree.leaves(model)]
    m, v = [0 * a for a in p], [0 * a for a in p]
    for step in range(3):
        g = [np.asarray(a, np.float64) for a in jax.tree.leaves(grad(model))]
        norm = math.sqrt(sum((a ** 2).sum() for a in g))
        model, optimizer, metrics = minigpt.train_step(
            model, optimizer, ids_BS, jax.random.key(0), 1)
        np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-4)
        assert norm > 0.05   # so that clipping is at work
        for i, a in enumerate(g):
            a = a * 0.05 / norm
            m[i], v[i] = 0.9 * m[i] + 0.1 * a, 0.95 * v[i] + 0.05 * a ** 2
            update = m[i] / (1 - 0.9 ** (step + 1)) / (np.sqrt(v[i] / (1 - 0.95 ** (step + 1))) + 1e-8)
            p[i] = p[i] - rates[step] * (update + (decay * p[i] if p[i].ndim > 1 else 0))
        sure = [np.abs(a) > 1e-5 for a in g]   # Adam turns rounding noise near 0 into whole steps
        for found, true, where in zip(jax.tree.leaves(model), p, sure):
            np.testing.assert_allclose(np.asarray(found)[where], true[where], atol=2e-5)
        p = [np.asarray(a, np.float64) for a in jax.tree.leaves(model)]


def test_dropout_acts_in_training_alone_and_differs_from_step_to_step():
    model = tiny_model(dropout=0.5)
    ids_BS = minigpt.to_devices(random_ids((4, 17)))
    mean = jax.jit(lambda model, key: minigpt.loss_fn(minigpt.gather(model), ids_BS, key))
    loss = lambda model, key=None: float(mean(model, key))
    losses, off = [loss(model, jax.random.key(i)) for i in (0, 0, 1)], loss(model)
    assert losses[0] == losses[1] != losses[2] and off not in losses
    assert off == loss(tiny_model(dropout=0.0))
    assert np.isclose(float(minigpt.eval_step(model, ids_BS).mean()), off)
    frozen, _ = minigpt.create_optimizer(model, 0.0, 0, 9, 0, 1)
    seen = []
    for _ in range(2):   # the same windows and parameters, another step
        model, frozen, metrics = minigpt.train_step(
            model, frozen, ids_BS, jax.random.key(0), 2)
        seen.append(float(metrics['loss']))
    assert seen[0] != seen[1]


def test_each_micro_batch_has_dropout_of_its_own():
    """Else the loss of eight that hold the same window would vary from step to step as that of one."""
    model = tiny_model(dropout=0.5)
    optimizer, _ = minigpt.create_optimizer(model, 0.0, 0, 999, 0, 1)   # learns nothing
    spread = []
    for n in (1, 8):
        ids_BS, losses = minigpt.to_devices(np.repeat(random_ids((1, 17)), n, axis=0)), []
        for _ in range(300):
            model, optimizer, metrics = minigpt.train_step(model, optimizer, ids_BS, jax.random.key(0), n)
            losses.append(float(metrics['loss']))
        spread.append(np.std(losses))
    assert spread[1] / spread[0] == pytest.approx(8 ** -0.5, rel=0.3)


@pytest.mark.parametrize('accum_steps', [1, 4])
def test_the_validation_loss_is_the_mean_over_all_held_out_windows(accum_steps, capsys):
    tokenizer, held_out = minigpt.load_tokenizer('bytes'), random_ids((11, 17), 257)   # 11 fill no batch of 8 or 2
    F = parse(*TINY, '--batch_size=8', f'--accum_steps={accum_steps}', '--prompt=a')
    model = tiny_model(vocab_size=257)
    true = numpy_losses(model, held_out, 257)
    assert float(minigpt.evaluate(F, 3, model, held_out, tokenizer)) == pytest.approx(np.mean(true), rel=1e-6)
    assert f'step 3, validation loss {np.mean(true):.4f}' in capsys.readouterr().out


# ---- Sampling -----------------------------------------------------------------------------------

def counting_model(tokenizer, mesh='1,1', sharpness=8.0, **changes):
    """A model whose next token is known: the one numbered one higher, whatever the position."""
    model = tiny_model(mesh, vocab_size=tokenizer.n_vocab, **changes)
    vectors = np.random.default_rng(0).choice([-1.0, 1.0], model.output_layer.shape).astype(np.float32)
    put = lambda old, new: jax.device_put(jnp.asarray(new, jnp.float32), old[...].sharding)
    for block in model.transformer_blocks:
        block.out[...] = put(block.out, np.zeros(block.out.shape))
        block.down[...] = put(block.down, np.zeros(block.down.shape))
    embedding = model.embedding_layer
    embedding.token_emb[...] = put(embedding.token_emb, vectors)
    embedding.pos_emb[...] = put(embedding.pos_emb, np.zeros(embedding.pos_emb.shape))
    following = np.roll(vectors, 1, axis=0) * sharpness
    following[tokenizer.n_vocab:] = 100 * vectors.sum(0)   # padded ids shout, and must not be heard
    model.output_layer[...] = put(model.output_layer, following)
    return model


def write(model, tokenizer, prompt='', **changes):
    options = dict(num_samples=1, max_new_tokens=0, top_k=10, temperature=1.0, seed=0) | changes
    return list(minigpt.generate_text(model, tokenizer, prompt=prompt, **options))


@pytest.mark.parametrize('mesh', ['1,1', '4,2', '1,8'])
def test_a_model_whose_next_token_is_known_writes_it(mesh):
    tokenizer = minigpt.load_tokenizer('bytes')
    model = counting_model(tokenizer, mesh)
    for temperature in (0.0, 1.0):
        assert write(model, tokenizer, 'abc', temperature=temperature) == ['abcdefghijklmno']
    assert write(model, tokenizer, 'ab', max_new_tokens=3) == ['abcde']
    assert write(model, tokenizer, 'ab', num_samples=3) == ['abcdefghijklmno'] * 3


def test_it_stops_at_end_of_text_and_writes_nothing_after_it():
    tokenizer = minigpt.load_tokenizer('words', ['yes', 'no'])   # ids 256, 257; end-of-text 258
    model = counting_model(tokenizer)
    assert write(model, tokenizer, 'yes', temperature=0.0) == ['yesno']
    assert write(model, tokenizer, 'yes', num_samples=2, temperature=0.5) == ['yesno'] * 2


def test_cached_decoding_gives_the_logits_of_the_full_forward_pass():
    model = jax.tree.map(lambda a: a * 4 if a.ndim > 1 else a, tiny_model('2,4'))
    ids_BT = random_ids((2, 16))

    @jax.jit
    def both(model, ids_BT):
        model = minigpt.gather(model)
        full, _ = model(ids_BT)
        _, caches = model(ids_BT.at[:, 5:].set(0))   # a prompt of 5, and what pads it
        steps = []
        for index in range(5, 16):
            x_B1D, caches = model(ids_BT[:, index:index + 1], caches, index)
            steps.append(x_B1D)
        return full[:, 5:], jnp.concatenate(steps, 1)

    full, cached = both(model, minigpt.to_devices(ids_BT))
    np.testing.assert_allclose(cached, full, atol=1e-5)


def test_greedy_text_is_that_of_a_full_forward_pass_for_every_token():
    tokenizer = minigpt.load_tokenizer('bytes')
    model = jax.tree.map(lambda a: a * 8 if a.ndim > 1 else a, tiny_model('1,1', vocab_size=257))
    ids = [tokenizer.eot_token, *b'abc']
    while len(ids) < SIZES['maxlen'] and (len(ids) < 5 or ids[-1] != tokenizer.eot_token):
        padded = np.array([ids + [0] * (SIZES['maxlen'] - len(ids))], np.int32)
        x_BTD, _ = minigpt.gather(model)(minigpt.to_devices(padded))
        z = np.asarray(x_BTD)[0, len(ids) - 1] @ np.asarray(model.output_layer[...])[:257].T
        ids.append(int(z.argmax()))
    prompt = np.array([ids[:4] + [0] * (SIZES['maxlen'] - 4)], np.int32)
    found = minigpt.generate_tokens(
        model, minigpt.to_devices(prompt), 4, SIZES['maxlen'], jax.random.key(0), 0.0,
        tokenizer.eot_token, 0)
    assert np.asarray(found)[0, :len(ids)].tolist() == ids and len(ids) > 8


def test_tokens_are_drawn_from_the_softmax_of_the_k_largest_logits_over_temperature():
    tokenizer = minigpt.load_tokenizer('bytes')
    model = counting_model(tokenizer, sharpness=0.08)   # a soft distribution after each token
    temperature, k, rows = 0.7, 4, 4096
    start = np.zeros((rows, SIZES['maxlen']), np.int32)
    drawn = minigpt.generate_tokens(
        model, minigpt.to_devices(start), 1, 3, jax.random.key(1), temperature,
        tokenizer.eot_token, k)
    first, second = np.asarray(drawn)[:, 1], np.asarray(drawn)[:, 2]
    x_BTD, _ = minigpt.gather(model)(minigpt.to_devices(start[:1]))
    z = np.asarray(x_BTD[0, 0]) @ np.asarray(model.output_layer[...])[:tokenizer.n_vocab].T
    best = np.argsort(z)[-k:]
    true = np.exp(z[best] / temperature) / np.exp(z[best] / temperature).sum()
    counts = np.array([(first == token).sum() for token in best])
    assert counts.sum() == rows                              # nothing outside the top k
    assert (np.abs(counts / rows - true) < 5 * np.sqrt(true / rows)).all()
    # A new key for each position: after the same first token the second one varies as well.
    same = second[first == best[-1]]
    assert len(set(same.tolist())) == k
    ranks = [np.argsort(np.argsort(-np.bincount(a, minlength=384))) for a in (first, second)]
    assert not np.array_equal(*ranks)


def test_greedy_text_is_the_same_on_every_mesh():
    tokenizer = minigpt.load_tokenizer('bytes')
    texts = [write(tiny_model(mesh, vocab_size=257), tokenizer, 'ab', temperature=0.0) for mesh in MESHES]
    assert texts == texts[:1] * 5 and len(texts[0][0]) > 2


def test_a_model_trained_on_short_stories_stops_where_they_stop(tmp_path, capsys, monkeypatch):
    (tmp_path / 'text.txt').write_text('ab<|endoftext|>' * 600)
    rows = train(tmp_path / 'run', f'--data={tmp_path / "text.txt"}', '--batch_size=8', '--mesh=1,1',
                 '--num_epochs=4', '--learning_rate=1e-2', '--eval_every=0')
    windows = 600 * 3 // 16                # tokens after the first are 600 x (a, b, end)
    training = windows - math.ceil(windows / 10)
    assert int(rows[-1]['step']) == training * 4 // 8
    capsys.readouterr()
    minigpt.sample(parse('--mode=sample', f'--workdir={tmp_path / "run"}', '--prompt=a', '--temperature=0'))
    assert capsys.readouterr().out == 'ab\n'
    monkeypatch.setattr(minigpt, 'create_model', lambda *_, **__: pytest.fail('it went on'))
    with pytest.raises(SystemExit, match='--prompt has 15 tokens, maxlen room for 14'):
        minigpt.sample(parse('--mode=sample', f'--workdir={tmp_path / "run"}', '--prompt=' + 'a' * 15))


def test_ids_that_stand_for_nothing_are_not_written():
    tokenizer = tiktoken.Encoding('gap', pat_str='.', special_tokens={'<|endoftext|>': 299},
                                  mergeable_ranks={bytes([i]): i for i in range(256)})
    model = tiny_model(vocab_size=300)   # untrained: it draws the 43 unused ids as often as others
    texts = write(model, tokenizer, 'a', temperature=100.0, top_k=0, num_samples=8)
    assert all(text.startswith('a') for text in texts)


def test_samples_differ_from_each_other_and_repeat_with_their_seed():
    tokenizer, model = minigpt.load_tokenizer('bytes'), tiny_model('4,2', vocab_size=257)
    texts = write(model, tokenizer, 'abc', num_samples=3, top_k=0)
    assert len(set(texts)) == 3
    assert texts == write(model, tokenizer, 'abc', num_samples=3, top_k=0)
    assert texts != write(model, tokenizer, 'abc', num_samples=3, top_k=0, seed=1)
    greedy = write(tiny_model('1,1', vocab_size=257), tokenizer, 'abc', temperature=0.0)
    assert greedy == write(tiny_model('4,2', vocab_size=257), tokenizer, 'abc', temperature=0.0)


def test_one_compilation_serves_every_prompt():
    tokenizer, model = minigpt.load_tokenizer('bytes'), tiny_model(vocab_size=257)
    minigpt.generate_tokens.clear_cache()
    for prompt in ('', 'a', 'a longer one'):
        write(model, tokenizer, prompt)
    assert minigpt.generate_tokens._cache_size() == 1


def test_a_prompt_that_leaves_no_room_is_refused():
    tokenizer, model = minigpt.load_tokenizer('bytes'), tiny_model(vocab_size=257)
    assert write(model, tokenizer, 'x' * 14, temperature=0.0)[0].startswith('x' * 14)
    with pytest.raises(SystemExit, match='15 tokens, maxlen room for 14'):
        write(model, tokenizer, 'x' * 15)


# ---- Data ---------------------------------------------------------------------------------------

def tokens_of(path, workdir, tokenizer=None):
    ids, digest = minigpt.load_tokens(path, tokenizer or minigpt.load_tokenizer('bytes'), workdir)
    return ids.tolist(), digest


def test_every_grammar_story_has_64_tokens_and_choices_as_likely_as_the_entropy_says():
    stories = list(minigpt.grammar_stories())
    tokenizer = minigpt.load_tokenizer('words', minigpt.common_words(stories))
    assert {len(tokenizer.encode(story, allowed_special='all')) for story in stories} == {64}
    entropy = 0
    for name, words in minigpt.CHOICES.items():
        words = words.split()
        counts = np.array([sum(word in story.replace('.', ' ').split() for story in stories) for word in words])
        assert counts.sum() == len(stories)    # one of the words, in each story
        entropy += math.log(len(words))
        assert (np.abs(counts / len(stories) - 1 / len(words)) < 0.03).all()
    assert math.isclose(entropy / 64, minigpt.ENTROPY)


def test_line_endings_and_byte_order_mark_do_not_change_the_ids(tmp_path):
    plain = b'one\ntwo<|endoftext|>\nthree, na\xc3\xafve\n'
    forms = [plain, plain.replace(b'\n', b'\r\n'), plain.replace(b'\n', b'\r'), b'\xef\xbb\xbf' + plain]
    found = []
    for i, form in enumerate(forms):
        (tmp_path / f'{i}.txt').write_bytes(form)
        found.append(tokens_of(tmp_path / f'{i}.txt', tmp_path)[0])
    end = 256
    assert found[0] == [end, *b'one\ntwo', end, *'three, naïve'.encode(), end]
    assert found[1:] == found[:1] * 3


def test_the_token_file_is_whole_or_absent_and_remade_when_text_or_tokenizer_change(tmp_path, monkeypatch):
    path = write_text(tmp_path / 'my text.txt')
    ids, digest = tokens_of(path, tmp_path)
    made = sorted(tmp_path.glob('*.tokens'))
    assert [file.name.split('.')[:3] for file in made] == [['my text', 'txt', 'bytes']]
    stamp = made[0].stat().st_mtime_ns
    assert tokens_of(path, tmp_path) == (ids, digest) and made[0].stat().st_mtime_ns == stamp
    path.write_text('another text<|endoftext|>')
    assert tokens_of(path, tmp_path)[0] == [256, *b'another text', 256]
    words = minigpt.load_tokenizer('words', [' text'])
    assert tokens_of(path, tmp_path, words)[0] == [257, *b'another', 256, 257]
    words = minigpt.load_tokenizer('words', ['another'])
    assert tokens_of(path, tmp_path, words)[0] == [257, 256, *b' text', 257]
    path.write_text('a third')
    monkeypatch.setattr(os, 'replace', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tokens_of(path, tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.glob('.part-*'))
    assert tokens_of(path, tmp_path)[0] == [256, *b'a third', 256]


def test_overlong_stories_and_special_texts_keep_every_character(tmp_path, monkeypatch):
    monkeypatch.setattr(minigpt, 'BLOCK', 64)
    stories = ['word ' * 100 + 'x' * 200 + ' <|endofprompt|> <|fim_prefix|>', 'last 🙂']
    stories += ['x' * n + ' ' + 'y' * 60 for n in range(50, 200)]   # a space on either side of each cut
    (tmp_path / 'a.txt').write_text('<|endoftext|>'.join(stories), encoding='utf-8')
    ids, _ = tokens_of(tmp_path / 'a.txt', tmp_path)
    true = b''.join(story.encode() + b'\xff' for story in stories)   # which no UTF-8 text holds
    assert ids[0] == 256 and bytes(min(i, 255) for i in ids[1:]) == true
    (tmp_path / 'b.txt').write_text('x' * 60 + ' ' * 100 + '<|endoftext|>y<|endoftext|>')
    ids, _ = tokens_of(tmp_path / 'b.txt', tmp_path)
    assert bytes(i for i in ids if i < 256 and i != 32) == b'x' * 60 + b'y'
    assert [i for i in ids if i == 256] == [256] * 3 and ids[-3:] == [256, *b'y', 256]


def test_windows_cover_the_stream_once_and_held_out_ones_never_train():
    ids = np.arange(1001, dtype=np.uint16)
    training, held_out = minigpt.split_windows(ids, 10, 4)
    assert (len(training), len(held_out)) == (90, 10)
    windows = [training[i] for i in range(90)] + [held_out[i] for i in range(10)]
    for i, window in enumerate(windows):
        np.testing.assert_array_equal(window, np.arange(10 * i, 10 * i + 11))
    seen = np.concatenate(list(minigpt.training_batches(training, 9, 0)[:30]))
    assert seen[:, 1:].max() <= 900 and len(seen) == 270
    np.testing.assert_array_equal(np.unique(seen[:90, 0]), np.arange(0, 900, 10))   # each window once


def test_the_order_of_batches_follows_from_seed_and_step_alone():
    training, _ = minigpt.split_windows(np.arange(2001, dtype=np.uint16), 10, 4)
    batches = lambda seed, start, total: list(minigpt.training_batches(training, 7, seed)[start:total])
    whole = batches(3, 0, 60)
    np.testing.assert_array_equal(whole[:40], batches(3, 0, 40))       # more epochs, same beginning
    np.testing.assert_array_equal(whole[31:], batches(3, 31, 60))      # from the middle
    assert not np.array_equal(whole, batches(4, 0, 60))
    epochs = np.concatenate(whole)[:, 0]
    assert not np.array_equal(epochs[:180], epochs[180:360])           # shuffled anew each epoch
    one = list(minigpt.training_batches(training[:1], 1, 0)[2**31 - 4:2**31 - 1])   # the last steps there can be
    np.testing.assert_array_equal(one, [training[:1]] * 3)


# ---- Profile and speed --------------------------------------------------------------------------

def test_flops_are_those_of_xlas_cost_analysis_of_the_default_model(monkeypatch):
    minigpt.create_mesh('1,1')
    sizes = dict(num_transformer_blocks=8, maxlen=256, embed_dim=256, feed_forward_dim=256)
    vocab_size = 50304   # padded on both sides
    model = jax.eval_shape(lambda: minigpt.MiniGPT(
        vocab_size, **sizes, num_heads=8, dropout=0.0, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    monkeypatch.setattr(minigpt, 'CHUNK', 2 * 256)   # all in one: XLA counts a loop's body once
    ids_BS = minigpt.to_devices(np.zeros((2, 257), np.int32))
    forward = jax.jit(lambda model, ids_BS: minigpt.loss_fn(minigpt.gather(model), ids_BS))
    counted = forward.lower(model, ids_BS).cost_analysis()['flops']   # not compiled
    assert minigpt.step_flops(2 * 256, vocab_size, **sizes) / 3 == pytest.approx(counted, rel=0.05)


def test_operations_are_of_the_kind_that_they_do():
    minigpt.create_mesh('4,2')
    x_BD = jax.device_put(jnp.ones((8, 64)), P('batch', 'model'))
    w_DF = jax.device_put(jnp.ones((64, 64)), P('model', None))
    product = lambda x, w: jnp.tanh(jnp.einsum('bd,df->bf', x, w, out_sharding=P('batch', None)))
    def program(x, w):
        return jax.lax.fori_loop(0, 3, lambda i, x: jax.reshard(product(x, w), P('batch', 'model')), x)
    hlo = jax.jit(program).lower(x_BD, w_DF).compile().as_text()
    kinds = minigpt.op_kinds(hlo)
    assert not any(re.search(rf'%{re.escape(op)} = .* while\(', hlo) for op in kinds)
    for op, kind in kinds.items():
        line = re.search(rf'%{re.escape(op)} = (.*)', hlo)[1]
        assert (kind == 'collectives') == bool(re.search(r' (all-reduce|all-gather)\(', line)), line
        assert (kind == 'matmul') >= bool(re.search(r' dot\(', line)), line
        assert (kind == 'elementwise') >= bool(re.search(r' (tanh|add|copy|parameter)\(', line)), line
    assert set(kinds.values()) == {'matmul', 'collectives', 'elementwise'}
    assert minigpt.op_kinds("""
%fused.1 (a: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2]{1,0} parameter(0)
  ROOT %dot.7 = f32[2,2]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (b: f32[2,2]) -> f32[2,2] {
  %b = f32[2,2]{1,0} parameter(0)
  ROOT %odd_name = f32[2,2]{1,0} fusion(%b), kind=kOutput, calls=%fused.1
}""")['odd_name'] == 'matmul'


@pytest.mark.parametrize('mesh', ['1,1', '4,2'])
def test_the_profile_says_where_the_steps_time_went_and_shares_add_up(mesh, tmp_path, capsys):
    path = write_text(tmp_path / 'text.txt')
    arguments = [f'--data={path}', '--batch_size=8', f'--mesh={mesh}', '--eval_every=8', '--log_every=1']
    rows = train(tmp_path / 'run', *arguments, '--max_steps=12', '--profile_steps=6')
    out = capsys.readouterr().out
    speed, shares, longest = re.search(r'--- 6 steps traced: .*\n(.*)\n(.*)\nlongest: (.*)', out).groups()
    ms, low, high, each, tera, rate = map(float, re.findall(r'[\d.]+(?= ms| TFLOP|k tok|,|\))', speed))
    assert low <= ms <= high and each == pytest.approx(ms / 8, abs=0.02)
    traced = [8 * SIZES['maxlen'] / float(row['tokens_per_s']) * 1e3 for row in rows[5:11]]   # steps 5 to 10
    assert ms == pytest.approx(np.median(traced), rel=0.01, abs=0.1)
    assert rate * 1e3 == pytest.approx(8 * SIZES['maxlen'] / ms * 1e3, rel=0.05)
    share = {name: float(percent) for name, percent in re.findall(r'([a-z]+) ([\d.]+)%', shares)}
    assert set(share) == {'matmul', 'elementwise', 'collectives', 'input', 'idle'} or mesh == '1,1'
    assert sum(share.values()) == pytest.approx(100, abs=0.3) and share['matmul'] > 0
    assert longest.count('%') == 5
    assert [int(row['step']) for row in rows] == list(range(13))   # the traced steps are steps of the run
    assert len(list((tmp_path / 'run/profile').rglob('*.xplane.pb'))) == 1
    train(tmp_path / 'run', *arguments, '--max_steps=23', '--profile_steps=6')   # resumed, traced again
    assert '--- 6 steps traced' in capsys.readouterr().out
    train(tmp_path / 'run', *arguments, '--max_steps=10', '--profile_steps=6', '--overwrite')
    assert 'no profile: 10 steps are left, 5 + 6 are needed' in capsys.readouterr().out


def test_the_log_gives_the_share_of_a_known_peak_and_none_above_it(tmp_path):
    report = minigpt.Report(tmp_path, 0, 9, 1000, 2e12, 8e12, None, None)
    assert report.speed(0.5) == '2.00k tok/s | 50% MFU'
    assert report.speed(0.2) == '5.00k tok/s'   # 125% cannot be
    assert minigpt.Report(tmp_path, 0, 9, 1000, 2e12, math.inf, None, None).speed(0.5) == '2.00k tok/s'
    assert minigpt.peak_flops(minigpt.create_mesh('4,2')) > 1e8


def test_many_arrays_on_many_devices_are_summed_and_evaluated_without_a_deadlock(tmp_path):
    path = write_text(tmp_path / 'text.txt', stories=400)
    run = cli(*TINY, '--num_transformer_blocks=8', f'--data={path}', '--tokenizer=words', '--mesh=4,2',
              '--batch_size=8', '--max_steps=2', f'--workdir={tmp_path / "run"}')
    assert run.returncode == 0, run.stderr


# ---- The mesh and bad input ---------------------------------------------------------------------

@pytest.mark.parametrize('text, devices, simulated, shape', [
    ('4,2', 8, False, (4, 2)), ('-1,2', 8, False, (4, 2)), ('2,-1', 8, False, (2, 4)),
    ('-1,1', 8, False, (8, 1)), ('-1,1', 1, True, (1, 1)), ('2,2', 8, True, (2, 2))])
def test_mesh_shapes_that_fit(text, devices, simulated, shape):
    assert minigpt.mesh_shape(text, devices, simulated) == shape


@pytest.mark.parametrize('text, devices, message', [
    ('3,2', 8, r'--mesh=3,2 needs 6 devices, this machine has 8: use 4,2 or -1,2'),
    ('8,2', 8, r'--mesh=8,2 needs 16 devices, this machine has 8: use 4,2 or -1,2'),
    ('-1,3', 8, r'--mesh=-1,3 .* this machine has 8'), ('4', 8, 'not batch,model'),
    ('4x2', 8, 'not batch,model'), ('0,8', 8, 'not batch,model'), ('-1,-1', 8, 'not batch,model')])
def test_meshes_that_do_not_fit_are_refused_in_one_line(text, devices, message):
    with pytest.raises(SystemExit, match=message) as error:
        minigpt.mesh_shape(text, devices, simulated=False)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('arguments, message', [
    (['mesh=4,2', '--seed=1', 'x'], r"Stray argument \['mesh=4,2'\]: flags begin with --"),
    (['--bath_size=3'], r"Unknown command line flag 'bath_size'. Did you mean: batch_size"),
    (['--batch_size=0'], r'--batch_size=0'),
    (['--batch_size=many'], r'batch_size=many'),
    (['--dropout=1.5'], r'dropout=1.5'),
    (['--data=nowhere.txt'], r'--data=nowhere.txt: no such file'),
    (['--tokenizer=gpt7'], r'--tokenizer=gpt7 is not one of bytes, words, gpt2'),
    (['--mesh=4,2', '--batch_size=145'], r'--batch_size=145 .*4: use 148'),
    (['--mesh=1,8', '--num_heads=4'], r'--num_heads=4 is not divisible by model axis=8: use 8'),
    (['--mesh=1,8', '--feed_forward_dim=20'], r'--feed_forward_dim=20 .*=8: use 24'),
    (['--mesh=1,3', '--num_heads=3', '--embed_dim=33', '--feed_forward_dim=33'], r'=1,3: .*power of 2'),
    (['--mesh=100000,1'], r'--mesh=100000,1 needs 100000 devices, this machine has'),
    (['--mesh=1,99999999999'], r'needs 99999999999 devices'),
    (['--learning_rate=nan'], r'nan'),
    (['--learning_rate=inf'], r'learning_rate=inf: .* range'),
    (['--num_samples=100000000000'], r'num_samples=100000000000: .* range \[1, 10000\]'),
    (['--num_epochs=99999999999999'], r'num_epochs=99999999999999: .* range'),
    (['--embed_dim=4000000000000'], r'embed_dim=4000000000000: .* range'),
    (['--data='], r'--data=: no such file'),
    (['--top_k=-1'], r'--top_k=-1: .* non-negative'),
    (['--temperature=-0.5'], r'--temperature=-0.5: .* range'),
    (['--seed=4294967296'], r'range \[0, 4294967295\]'),
    (['--workdir=' + __file__], r'test_minigpt.py/checkpoints: Not a directory'),
    (['--data=' + os.path.dirname(__file__)], r'no such file'),
    (['--num_heads=5'], r'--embed_dim=32 is not divisible by --num_heads=5: use 35'),
    (['--maxlen=1'], r'maxlen=1'),
    (['--batch_size=99999999999999999999'], r'batch_size=99999999999999999999: .* range'),
    (['--workdir=runs/a[1]'], r'runs/a\[1\]: Orbax cannot'),
    (['--batch_size=100000'], r'windows of 16 to train on, fewer than --batch_size=100000'),
    (['--prompt=Once upon a time there', '--tokenizer=bytes'], r'--prompt has 22 tokens, maxlen room for 14'),
    (['--mode=sample'], r'no checkpoint to sample from')])
def test_bad_input_ends_in_one_line_before_anything_compiles(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr(minigpt, 'create_model', lambda *_, **__: pytest.fail('it went on'))
    with pytest.raises(SystemExit, match=message) as error:
        parse(*TINY, f'--workdir={tmp_path / "run"}', '--prompt=One', *arguments)
        minigpt.main([])
    assert '\n' not in str(error.value)


def test_overwrite_deletes_nothing_before_all_is_checked_and_then_only_the_run(tmp_path):
    path = write_text(tmp_path / 'text.txt')
    arguments = [f'--data={path}', '--batch_size=8', '--max_steps=2', '--mesh=1,1', '--overwrite']
    train(tmp_path, *arguments)
    with pytest.raises(SystemExit, match='--prompt has 200 tokens'):
        train(tmp_path, *arguments, '--prompt=' + 'x' * 200)
    assert (tmp_path / 'checkpoints' / '2').is_dir() and path.exists()
    rows = train(tmp_path, *arguments, '--seed=1', '--max_steps=3')
    assert path.exists() and [row['step'] for row in rows] == ['0', '3']
    (tmp_path / 'checkpoints').rename(tmp_path / 'large disk')
    (tmp_path / 'checkpoints').symlink_to(tmp_path / 'large disk')
    with open(tmp_path / 'metrics.csv', 'ab') as file:
        file.write(b'a,b,c,d,e,f\n\xff\xfe\n12,0.1')   # which somebody else must have written
    rows = train(tmp_path, *arguments, '--seed=1', '--max_steps=3')
    assert [row['step'] for row in rows] == ['0', '3']
    assert [folder.name for folder in (tmp_path / 'checkpoints').iterdir()] == ['3']


@pytest.mark.parametrize('content, message', [
    (b'x' * 200000 + b'\xe9' + b'y' * 20000, 'not UTF-8 text.*byte 200000'),
    ('naïve'.encode('utf-16'), 'not UTF-8 text.*byte 0'),
    ('plain'.encode('utf-16-le'), 'NUL'),
    (gzip.compress(b'a story'), 'not UTF-8 text.*byte 1.*gunzip'),
    (b'cut in a character \xc3', 'not UTF-8 text.*byte 19')])
def test_a_file_that_is_not_utf8_is_refused_in_one_line_that_names_the_byte(content, message, tmp_path):
    path = tmp_path / 'text.txt'
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=message) as error:
        tokens_of(path, tmp_path)
    assert '\n' not in str(error.value)
    assert not list(tmp_path.glob('*.tokens')) + list(tmp_path.glob('.part-*'))


@pytest.mark.parametrize('content', ['', '<|endoftext|>' * 9, '\n \n<|endoftext|>\n', 'one short story'])
def test_a_text_with_too_little_to_train_on_is_refused_with_both_numbers(content, tmp_path):
    path = tmp_path / 'text.txt'
    path.write_text(content)
    for tokenizer in 'bytes', 'words':
        with pytest.raises(SystemExit, match=r'tokens give \d+ windows of 16 .*--batch_size=8: lower') as error:
            train(tmp_path / 'run', f'--data={path}', '--batch_size=8', f'--tokenizer={tokenizer}')
        assert '\n' not in str(error.value)


def test_a_million_characters_without_a_word_are_tokenised_and_read_back(tmp_path):
    """gpt2's pattern, which looks ahead in spaces, needs the text in pieces; bytes stand for its ids."""
    gpt2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    tokenizer = tiktoken.Encoding('gpt2-like', pat_str=gpt2, special_tokens={'<|endoftext|>': 257},
                                  mergeable_ranks={bytes([i]): i for i in range(256)} | {b'aa': 256})
    text = 'x' + ' ' * 1_500_000 + 'a' * 1_000_000
    (tmp_path / 'text.txt').write_text(text)
    ids, _ = tokens_of(tmp_path / 'text.txt', tmp_path, tokenizer)
    assert ids[0] == ids[-1] == 257 and tokenizer.decode(ids[1:-1]) == text


def test_a_text_is_found_by_link_home_and_spaces_and_a_folder_nobody_may_write_is_left_alone(tmp_path, monkeypatch):
    folder = tmp_path / 'my texts'
    folder.mkdir()
    (tmp_path / 'link.txt').symlink_to(write_text(folder / 'a b.txt'))
    monkeypatch.setenv('HOME', str(tmp_path))
    arguments = ['--batch_size=8', '--max_steps=1', '--mesh=1,1', '--eval_every=0']
    for data in 'my texts/a b.txt', 'link.txt':
        train('~/run', f'--data=~/{data}', *arguments)   # the same text: the second run finds it finished
    assert (tmp_path / 'run' / 'checkpoints' / '1').is_dir() and not pathlib.Path('~').exists()
    for made in [*folder.glob('*.tokens'), *tmp_path.glob('*.tokens')]:
        made.unlink()
    monkeypatch.setattr(os, 'access', lambda *_: False)   # root may write everywhere
    train(tmp_path / 'run', f'--data={folder / "a b.txt"}', *arguments)
    assert list((tmp_path / 'run').glob('*.tokens')) and not list(folder.glob('*.tokens'))


def test_a_tokenizer_that_cannot_be_had_names_the_folder_and_the_file_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    error = requests.ConnectionError('no network', request=requests.Request('GET', 'https://x/vocab.bpe').prepare())
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda _: (_ for _ in ()).throw(error))
    with pytest.raises(SystemExit) as stopped:
        minigpt.load_tokenizer('gpt2')
    name = hashlib.sha1(b'https://x/vocab.bpe').hexdigest()   # as tiktoken/load.py names it
    assert all(part in str(stopped.value) for part in ('TIKTOKEN_CACHE_DIR', 'https://x/vocab.bpe', name))
    assert '\n' not in str(stopped.value)


# ---- Whole runs ---------------------------------------------------------------------------------

LONG = [*TINY, '--tokenizer=bytes', '--prompt=the', '--batch_size=16', '--accum_steps=2', '--dropout=0.1',
        '--max_steps=20', '--checkpoint_every=3', '--eval_every=5', '--log_every=1', '--keep=9']


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp('text') / 'text.txt')   # 20 steps are two epochs of it


@pytest.fixture(scope='module')
def never_stopped(text, tmp_path_factory):
    """{mesh: workdir} of runs that nothing stops, made when they are asked for."""
    class Runs(dict):
        def __missing__(self, mesh):
            self[mesh] = tmp_path_factory.mktemp('whole')
            train(self[mesh], *LONG, f'--data={text}', f'--mesh={mesh}')
            return self[mesh]
    return Runs()


def state_of(workdir, mesh='1,1', step=20):
    """All arrays of a run's checkpoint."""
    model = tiny_model(mesh, vocab_size=257, seed=9, dropout=0.1)
    optimizer, _ = minigpt.create_optimizer(model, 1e-3, 0, 9, 0.1, 1.0)
    manager = minigpt.open_checkpoints(pathlib.Path(workdir), 9, read_only=True)
    assert minigpt.restore(manager, model=model, optimizer=optimizer)[0] == step
    return jax.device_get(jax.tree.leaves((model, optimizer)))


def rows_of(workdir):
    """metrics.csv without its clock."""
    with open(pathlib.Path(workdir) / 'metrics.csv') as file:
        return [{k: v for k, v in row.items() if k != 'tokens_per_s'} for row in csv.DictReader(file)]


def wait_for_steps(process, workdir):
    """Waits until a few steps have been logged."""
    assert wait_until(process, (workdir / 'metrics.csv').exists), process.communicate()
    assert wait_until(process, lambda: len(rows_of(workdir)) > 2), process.communicate()


def assert_same_arrays(found, true):
    for a, b in zip(found, true, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_same_run(found, true):
    assert rows_of(found) == rows_of(true) and len(rows_of(found)) == 21
    assert_same_arrays(state_of(found), state_of(true))


def test_a_resumed_run_is_bit_for_bit_one_that_never_stopped(text, never_stopped, tmp_path):
    whole, stopped = never_stopped['4,2'], tmp_path / 'stopped'
    shutil.copytree(whole, stopped)
    for step in (12, 15, 18, 20):   # as if it had been killed after step 9
        shutil.rmtree(stopped / 'checkpoints' / str(step))
    with open(stopped / 'metrics.csv', 'a') as file:
        file.write('7,1,1,1,1,1,1,1\n')   # which is no row of it
    train(stopped, *LONG, f'--data={text}', '--mesh=4,2')
    assert_same_run(stopped, whole)


def test_a_reader_of_the_log_that_ends_first_does_not_keep_a_run_from_saving(text, tmp_path):
    process = start(*LONG, f'--data={text}', '--mesh=1,1', f'--workdir={tmp_path}', '--max_steps=100000',
                    '--checkpoint_every=0', '--eval_every=0')
    wait_for_steps(process, tmp_path)
    process.stdout.close()   # as Ctrl-C ends the other part of `| tee log`
    process.send_signal(signal.SIGTERM)
    err = process.stderr.read()
    assert process.wait(timeout=100) == 143 and 'Traceback' not in err, err
    assert list((tmp_path / 'checkpoints').glob('[0-9]*'))


def test_a_process_killed_inside_a_save_goes_on_exactly(text, never_stopped, tmp_path):
    arguments = [*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={tmp_path}']
    process = start(*arguments)
    checkpoints = tmp_path / 'checkpoints'
    saving = lambda: list(checkpoints.glob('*tmp*')) and (checkpoints / '6').exists()
    while True:
        assert wait_until(process, saving), process.communicate()
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)   # until it stands still: inside the save, unless that has just ended
        if saving():
            break
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    assert list(checkpoints.glob('*tmp*')) and not (checkpoints / '20').exists()
    again = cli(*arguments)
    assert again.returncode == 0, again.stderr
    assert not list(checkpoints.glob('*tmp*'))
    assert_same_run(tmp_path, never_stopped['4,2'])


def test_sigterm_saves_and_the_same_command_goes_on_exactly(text, never_stopped, tmp_path):
    arguments = [*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={tmp_path}', '--checkpoint_every=0']
    process = start(*arguments)
    wait_for_steps(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 143 and 'Traceback' not in err, err
    step, = (int(folder.name) for folder in (tmp_path / 'checkpoints').iterdir())
    assert step < 20 and f'step {step}: saved in {tmp_path}; the same command goes on' in out
    again = cli(*arguments)
    assert again.returncode == 0 and f'steps {step} to 20' in again.stdout, again.stderr
    assert_same_run(tmp_path, never_stopped['4,2'])


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_tokenises_ends_it_and_leaves_no_part_of_a_file(number, tmp_path):
    text = write_text(tmp_path / 'text.txt', stories=1000)
    text.write_text(text.read_text() * 200)
    process = start(*LONG, f'--data={text}', f'--workdir={tmp_path / "run"}')
    assert wait_until(process, lambda: list(tmp_path.glob('.part-*/*'))), process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + number and err.count('\n') == 1, err
    assert {path.name for path in tmp_path.iterdir()} == {'text.txt', 'run'}


def test_a_second_process_may_not_train_in_a_workdir_where_one_does(text, tmp_path):
    arguments = [*LONG, f'--data={text}', '--mesh=1,1', f'--workdir={tmp_path}', '--max_steps=100000']
    first = start(*arguments, '--checkpoint_every=0', '--eval_every=0')
    wait_for_steps(first, tmp_path)
    before = (tmp_path / 'metrics.csv').read_bytes()
    second = cli(*arguments, '--overwrite', '--max_steps=3')
    assert second.returncode == 1 and second.stderr.count('\n') == 1, second.stderr
    assert 'another process trains there' in second.stderr
    assert (tmp_path / 'metrics.csv').read_bytes().startswith(before)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=100) == 143
    third = cli(*arguments, f'--max_steps={len(rows_of(tmp_path))}')   # it has as many steps, or one less
    assert third.returncode == 0, third.stderr


def start_pair(text, workdir):
    """Two processes that train together, four devices each."""
    with socket.socket() as free:
        free.bind(('localhost', 0))
        address = f'localhost:{free.getsockname()[1]}'
    return [start(*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={workdir}', '--num_processes=2',
                  f'--coordinator={address}', f'--process_id={i}') for i in range(2)]


def assert_near(found, true):
    """The same rows, with losses that differ by rounding."""
    assert [row['step'] for row in found] == [row['step'] for row in true]
    for a, b in zip(found, true):
        for name in ('loss', 'val_loss'):
            assert a[name] == b[name] == '' or math.isclose(float(a[name]), float(b[name]), abs_tol=1e-5)


def test_two_processes_are_one_and_a_signal_to_one_stops_both(text, never_stopped, tmp_path):
    first, second = start_pair(text, tmp_path)
    wait_for_steps(first, tmp_path)
    second.send_signal(signal.SIGTERM)
    (out, err), (silent, _) = [process.communicate(timeout=200) for process in (first, second)]
    assert (first.returncode, second.returncode) == (143, 143), err
    assert 'step' in out and not re.search('step|mesh|param|compil|save', silent)   # Gloo adds its own
    step = max(int(folder.name) for folder in (tmp_path / 'checkpoints').iterdir())
    assert f'step {step}: saved in' in out and step < 20
    pair = start_pair(text, tmp_path)
    (out, err), _ = [process.communicate(timeout=200) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], err
    assert f'steps {step} to 20' in out
    assert_near(rows_of(tmp_path), rows_of(never_stopped['4,2']))


@pytest.mark.parametrize('arguments', [
    ['--num_processes=2'], ['--process_id=3'], ['--coordinator=auto'], ['--coordinator=localhost'],
    ['--coordinator=localhost:1', '--num_processes=2', '--process_id=5']])
def test_flags_of_several_processes_that_do_not_fit_are_one_line(arguments, tmp_path):
    run = cli(*TINY, *arguments, cwd=tmp_path)
    assert run.returncode == 1 and re.fullmatch('--coordinator=.*', run.stderr.strip()), run.stderr


slow = pytest.mark.skipif('MINIGPT_SLOW' not in os.environ, reason='MINIGPT_SLOW=1 runs it')


@slow
@pytest.mark.parametrize('mesh', MESHES)
def test_a_run_killed_four_times_at_random_moments_loses_nothing(mesh, text, never_stopped, tmp_path):
    arguments = [*LONG, f'--data={text}', f'--mesh={mesh}', f'--workdir={tmp_path}']
    rng = random.Random(mesh)
    checkpoints = tmp_path / 'checkpoints'
    count = lambda: len([folder for folder in checkpoints.glob('*') if folder.name.isdigit()])
    for phase in ('any', 'save', 'step', 'save'):
        process, before = start(*arguments), count()
        if phase == 'any':       # imports, data, compilation
            wait_until(process, lambda until=time.time() + rng.uniform(0, 8): time.time() > until)
        elif phase == 'save':    # the next save or the one after it
            more = before + rng.randint(0, 1)
            wait_until(process, lambda: count() >= more and list(checkpoints.glob('*tmp*')))
            time.sleep(rng.uniform(0, 0.05))
        else:                    # a step or an evaluation
            began = time.time()
            wait_until(process, lambda: (tmp_path / 'metrics.csv').exists()
                       and (tmp_path / 'metrics.csv').stat().st_mtime > began)
            time.sleep(rng.uniform(0, 0.2))
        process.kill()
        assert process.wait() == -signal.SIGKILL   # it was still at work
        print(f'{mesh}: killed in {phase}, {count()} checkpoints, {before} before, '
              f'{len(list(checkpoints.glob("*tmp*")))} half-written')
    again = cli(*arguments)
    assert again.returncode == 0, again.stderr
    assert not list(checkpoints.glob('*tmp*'))
    assert_same_run(tmp_path, never_stopped[mesh])


@slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('phase', ['compile', 'step', 'evaluation', 'save'])
def test_a_signal_in_any_phase_stops_politely(number, phase, text, never_stopped, tmp_path):
    arguments = [*LONG, f'--data={text}', '--mesh=2,4', f'--workdir={tmp_path}']
    process = start(*arguments)
    words = {'compile': 'compiling', 'step': 'step 6/', 'evaluation': 'step 9/', 'save': 'step 10/'}
    for line in process.stdout:
        if line.startswith(words[phase]):
            break
    if phase == 'save':
        assert wait_until(process, lambda: list((tmp_path / 'checkpoints').glob('*tmp*')))
    began = time.time()
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    print(f'{signal.Signals(number).name} in {phase}: stopped after {time.time() - began:.1f} s')
    assert process.returncode == 128 + number and 'Traceback' not in err, err
    assert 'stopping; a second time' in err
    assert ('nothing to save' in out) == (phase == 'compile')
    again = cli(*arguments)
    assert again.returncode == 0, again.stderr
    assert_same_run(tmp_path, never_stopped['2,4'])


@slow
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_ends_the_other_and_both_go_on(victim, text, never_stopped, tmp_path):
    pair = start_pair(text, tmp_path)
    assert wait_until(pair[0], (tmp_path / 'metrics.csv').exists), pair[0].communicate()
    pair[victim].kill()
    began = time.time()
    pair[1 - victim].communicate(timeout=300)
    print(f'process {victim} killed: the other one ended after {time.time() - began:.0f} s')
    assert pair[1 - victim].returncode != 0
    pair = start_pair(text, tmp_path)
    assert [process.wait(timeout=300) for process in pair] == [0, 0]
    assert_near(rows_of(tmp_path), rows_of(never_stopped['4,2']))


def test_a_disk_that_is_full_is_one_line_and_leaves_the_older_checkpoints_whole(text, never_stopped, tmp_path):
    shutil.copytree(never_stopped['4,2'], tmp_path, dirs_exist_ok=True)
    before = state_of(tmp_path)
    process = start(*LONG, f'--data={text}', '--mesh=4,2', f'--workdir={tmp_path}', '--max_steps=24',
                    '--checkpoint_every=2', '--eval_every=0')
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))   # bytes in any one file
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1 and err.splitlines()[-1].startswith('A save failed'), err
    assert 'Traceback' not in err, err
    assert_same_arrays(state_of(tmp_path), before)


@pytest.mark.parametrize('place', ['run', 'run/checkpoints', 'run/metrics.csv/x'])
def test_a_file_or_folder_in_the_way_is_one_line(text, tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / place).write_text('mine')
    with pytest.raises(SystemExit, match='run.*(Not a directory|File exists|Is a directory)') as error:
        parse(*LONG, f'--data={text}', '--mesh=1,1', f'--workdir={tmp_path / "run"}')
        minigpt.main([])
    assert '\n' not in str(error.value) and (tmp_path / place).read_text() == 'mine'


def test_a_workdir_that_is_deleted_ends_the_run_in_one_line(text, tmp_path):
    run = tmp_path / 'run'
    process = start(*LONG, f'--data={text}', '--mesh=1,1', f'--workdir={run}', '--max_steps=100000',
                    '--eval_every=0')
    assert wait_until(process, lambda: (run / 'checkpoints' / '6').exists()), process.communicate()
    run.rename(tmp_path / 'elsewhere')
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1 and 'Traceback' not in err and len(err.strip().splitlines()) == 1, err


def largest_file(folder):
    """Where the arrays are."""
    return max((p for p in folder.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)


def flip_bits(folder):
    path = largest_file(folder)
    data = bytearray(path.read_bytes())
    for eighth in range(1, 8):
        data[len(data) * eighth // 8] ^= 1
    path.write_bytes(data)


def change_a_sum(folder):
    """As if an array had other bits than were saved."""
    path = folder / 'config' / 'metadata'
    config = json.loads(path.read_text())
    config['model'][3] ^= 1
    path.write_text(json.dumps(config))


def truncate(folder):
    path = largest_file(folder)
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize('damage', [
    flip_bits, change_a_sum, truncate, lambda folder: shutil.rmtree(folder / 'config')])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, text, never_stopped, tmp_path, capsys):
    whole, run = never_stopped['4,2'], tmp_path / 'run'
    shutil.copytree(whole, run)
    damage(run / 'checkpoints' / '18')
    damage(run / 'checkpoints' / '20')   # the last: the run is not finished then
    state_of(run, step=15)
    err = capsys.readouterr().err
    assert f'{run}/checkpoints/20 is damaged' in err and f'{run}/checkpoints/18 is damaged' in err
    train(run, *LONG, f'--data={text}', '--mesh=4,2')
    assert_same_run(run, whole)
    shutil.rmtree(run / 'checkpoints' / '20')
    state_of(run, step=18)   # which was made anew
    for folder in (run / 'checkpoints').iterdir():
        damage(folder)
    with pytest.raises(SystemExit, match='no checkpoint could be read'):
        train(run, *LONG, f'--data={text}', '--mesh=4,2', '--max_steps=21')


def test_checkpoints_that_a_run_deletes_while_another_process_reads_are_not_called_damaged(never_stopped, tmp_path, capsys):
    shutil.copytree(never_stopped['4,2'], tmp_path, dirs_exist_ok=True)
    manager = minigpt.open_checkpoints(tmp_path, read_only=True)
    for step in manager.all_steps():
        if step != 18:
            shutil.rmtree(tmp_path / 'checkpoints' / str(step))
    (tmp_path / 'checkpoints' / '18').rename(tmp_path / 'checkpoints' / '24')
    assert minigpt.restore(manager)[0] == 24 and not capsys.readouterr().err


def test_a_checkpoint_is_read_onto_every_mesh_bit_for_bit(never_stopped):
    whole = state_of(never_stopped['4,2'], '4,2')
    for mesh in MESHES:
        assert_same_arrays(state_of(never_stopped['4,2'], mesh), whole)


def test_bit_sums_are_those_of_numpy_on_every_mesh():
    for mesh in ('1,1', '4,2'):
        model = tiny_model(mesh)
        true = [int(np.asarray(a).view(np.uint32).sum(dtype=np.uint64)) % 2**32 for a in jax.tree.leaves(model)]
        assert minigpt.bit_sums(model) == true


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    minigpt.create_mesh('1,1')
    manager = minigpt.open_checkpoints(tmp_path, keep=2)
    module = minigpt.nnx.Dict(zeros=minigpt.nnx.Param(jnp.zeros(3)))
    for step, loss in enumerate([3.0, 1.0, None, 2.0, None, 4.0, 5.0]):
        minigpt.save(manager, step, {}, loss and np.float32(loss), module=module)
    manager.close()
    assert {folder.name for folder in (tmp_path / 'checkpoints').iterdir()} == {'1', '5', '6'}
    best = tmp_path / 'checkpoints' / '1' / 'metrics' / 'metrics'   # in the form of the runs there are
    assert json.loads(best.read_text()) == {'val_loss': 1.0}


def test_opening_checkpoints_and_token_files_unpickles_nothing(text, never_stopped, monkeypatch, tmp_path):
    whole = never_stopped['4,2']
    tokenizer = minigpt.load_tokenizer('bytes')
    minigpt.load_tokens(text, tokenizer, tmp_path)
    for name in ('load', 'loads', 'Unpickler'):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail('something was unpickled'))
    state_of(whole)
    minigpt.load_tokens(text, tokenizer, tmp_path)


def test_a_run_that_is_not_finite_names_the_step_and_saves_nothing_after_it(text, tmp_path):
    arguments = [*LONG, f'--data={text}', '--mesh=1,1', '--learning_rate=1e30', '--warmup_steps=0']
    with pytest.raises(SystemExit, match=r'step [1-3] went wrong and is not saved: .*(nan|inf)'):
        train(tmp_path, *arguments, '--log_every=9', '--checkpoint_every=4', '--eval_every=0')
    assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))
    run = cli(*arguments, '--log_every=99', '--checkpoint_every=1', '--eval_every=0', f'--workdir={tmp_path}/2')
    assert run.returncode == 1   # seen at a checkpoint, before any log line
    assert re.fullmatch(r'step [1-3] went wrong and is not saved: .*', run.stderr.strip())
    saved = [int(folder.name) for folder in (tmp_path / '2' / 'checkpoints').iterdir()]
    assert saved and all(np.isfinite(a).all() for a in state_of(tmp_path / '2', step=max(saved)))


def test_a_checkpoint_goes_on_on_another_mesh_and_names_what_may_not_change(tmp_path, capsys):
    path = write_text(tmp_path / 'text.txt')
    arguments = [f'--data={path}', '--batch_size=8', '--max_steps=6', '--log_every=1']
    arguments += ['--accum_steps=1', '--checkpoint_every=3']
    train(tmp_path / 'a', *arguments, '--mesh=8,1')
    shutil.copytree(tmp_path / 'a', tmp_path / 'b')
    shutil.rmtree(tmp_path / 'b' / 'checkpoints' / '6')
    moved = train(tmp_path / 'b', *arguments, '--mesh=2,4')
    stayed = list(csv.DictReader(open(tmp_path / 'a' / 'metrics.csv')))
    for a, b in zip(stayed[:6], moved[:6], strict=True):
        assert math.isclose(float(a['loss']), float(b['loss']), abs_tol=1e-5)
    assert 'from step 3 on: mesh 8,1 -> 2,4\n' in capsys.readouterr().out
    for change, message in [('--embed_dim=64', 'embed_dim 32 -> 64'), ('--seed=1', 'seed 42 -> 1'),
                            ('--batch_size=16', 'batch_size 8 -> 16')]:
        with pytest.raises(SystemExit, match=message):
            train(tmp_path / 'a', *arguments, '--mesh=8,1', change)
    capsys.readouterr()
    train(tmp_path / 'a', *arguments, '--mesh=8,1')
    assert '--max_steps' in (out := capsys.readouterr().out) and '--overwrite' in out


def test_the_script_trains_samples_and_compiles_its_step_once(tmp_path):
    run = cli(*TINY, '--max_steps=12', '--eval_every=6', '--mesh=2,2', '--batch_size=4', '--profile_steps=3',
              cwd=tmp_path, JAX_DUMP_IR_TO=str(tmp_path / 'ir'), HTTPS_PROXY='http://127.0.0.1:9',
              TIKTOKEN_CACHE_DIR='',   # no network; and no warning, but of a type of JAX's profiler
              PYTHONWARNINGS='error:::__main__,ignore:builtin type:DeprecationWarning')
    assert run.returncode == 0, run.stderr
    assert len(list((tmp_path / 'ir').glob('*jit_train_step*compile*'))) == 1
    assert 'Traceback' not in run.stderr and 'donated' not in run.stderr
    workdir = tmp_path / 'runs' / 'grammar-1x32-b4-s42'
    rows = list(csv.DictReader(open(workdir / 'metrics.csv')))
    assert [row['step'] for row in rows] == ['0', '6', '10', '12']
    assert (workdir / 'loss.png').read_bytes().startswith(b'\x89PNG')
    assert float(rows[-1]['val_loss']) > minigpt.ENTROPY - 0.005
    assert 'simulated' in run.stdout and 'entropy' in run.stdout
    assert 'MB a device: weights and optimizer' in run.stdout
    sample = cli('--mode=sample', '--prompt=One naïve day', '--num_samples=2', cwd=tmp_path,
                 LC_ALL='C', PYTHONUTF8='1', PYTHONIOENCODING='ascii')   # an old terminal, UTF-8 arguments
    assert sample.returncode == 0, sample.stderr
    assert sample.stdout.count('One na?ve day') == 2 and 'runs' not in sample.stdout
    assert sample.stdout.startswith('One na?ve day')


README = SCRIPT.with_name('README.md').read_text()


def test_the_commands_of_the_readme_run_in_its_order(tmp_path, monkeypatch, capsys):
    """As they stand, after settings that make small what they leave to the defaults."""
    small = ['--embed_dim=32', '--feed_forward_dim=32', '--num_transformer_blocks=1', '--maxlen=32', '--max_steps=2',
             '--tokenizer=words', '--mesh=1,1']   # 8 devices are set up here, of which -1 would be all
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / 'my.txt')
    commands = re.findall(r'^    (wget|python minigpt.py) ?(.*)$', README, re.M)
    assert len(commands) >= 8
    for program, command in commands:
        if program == 'wget':
            write_text(tmp_path / command.split('/')[-1], stories=1000)
            continue
        parse(*small, *shlex.split(command))
        minigpt.main([])
        out = capsys.readouterr().out
        assert 'Once upon a time' in out if 'sample' in command else 'saved in runs/' in out, command
        assert ('steps traced' in out) == ('profile' in command)


def test_flags_and_names_that_the_readme_gives_exist():
    flags = set(minigpt.flags.FLAGS)
    named = set(re.findall(r'--(\w+)\b', re.sub(r'^    (?!python minigpt|run).*', '', README, flags=re.M)))
    assert len(named) > 20 and named - flags <= {'logdir'}, named - flags
    forks = README[README.index('## Change it'):README.index('## Profile')]
    code = set(re.findall(r'\w+', SCRIPT.read_text()))
    names = {name for quoted in re.findall('`([^`]+)`', forks) if '--' not in quoted for name in re.findall(r'\w+', quoted)}
    new = {'RMSNorm', 'gate', 'silu', 'lion', 'cumsum', 'softmax', 'py'}
    assert len(names) > 20 and names - code <= new, names - code
    sections = re.findall(r'^# ---- ([\w ]+):', SCRIPT.read_text(), re.M)
    assert ', '.join(sections) in ' '.join(forks.split())
    assert all(re.search(rf'^    {name}  ', minigpt.__doc__, re.M) for name in sections)


@pytest.mark.parametrize('changes', [
    [('nnx.LayerNorm(', 'nnx.RMSNorm(')],
    [('optax.adamw(', 'optax.lion('), (' b2=0.95,', '')],
    [("        self.down =", "        self.gate = weight(rngs, (D, F), 'batch', 'model')\n        self.down ="),
     ("self.norm2(x_BTD), self.up, 'model'))", "self.norm2(x_BTD), self.up, 'model'))\n        up_BTF *= nnx.silu("
      "project('btd,df->btf', self.norm2(x_BTD), self.gate, 'model'))")]], ids=['RMSNorm', 'Lion', 'gated MLP'])
def test_forks_that_the_readme_names_learn_the_same_on_two_meshes(changes, monkeypatch):
    true, _ = run_steps('1,1')
    monkeypatch.setattr(sys.modules[__name__], 'minigpt', fork(*changes))
    found, again = run_steps('1,1')[0], run_steps('4,2')[0]
    assert not np.allclose(found[:, 0], true[:, 0], atol=1e-4)   # it is another model or optimizer
    np.testing.assert_allclose(found[:, 0], again[:, 0], atol=1e-5)


def test_flags_may_stand_in_a_file(tmp_path):
    (tmp_path / 'flags.txt').write_text('--mesh=4,2\n# a comment\n--batch_size=16\n')
    F = parse(f'--flagfile={tmp_path / "flags.txt"}', '--batch_size=8')
    assert (F.mesh, F.batch_size) == ('4,2', 8)


def test_the_command_line_speaks_in_single_lines(tmp_path):
    run = cli('--mesh=3', '--nonsense=1', cwd=tmp_path)
    assert run.returncode == 1 and len(run.stderr.strip().splitlines()) == 1, run.stderr
    run = cli('--help', cwd=tmp_path)
    assert '--mesh' in run.stdout and run.returncode == 0, run.stderr
    assert not list(tmp_path.iterdir())
