"""minigpt: train, sample, resume and profile a GPT in JAX and Flax NNX, on one device or many.

    python minigpt.py                                   # learns a small story language in minutes
    python minigpt.py --mesh=4,2 --batch_size=144       # TinyStories-train.txt, on 8 devices
    python minigpt.py --mode=sample --prompt='One day'  # writes with the newest run

The sections of this file:
    Flags        ModelConfig, and each flag with its default
    Model        primer on the mesh; TransformerBlock, TokenAndPositionEmbedding, MiniGPT
    Data         text -> file of token ids -> windows -> shuffled batches (Grain)
    Mesh         --mesh is checked, simulated on CPUs, built
    Train step   loss fused with the output layer, AdamW, gradient accumulation
    Reports      log lines, metrics.csv, loss.png, profile
    Sampler      top-k sampling with a KV cache, in one compiled loop
    Checkpoint   saved in the background, restored onto any mesh (Orbax)
    Main         set-up, the training loop, --mode=sample
The end of an array's name gives its shape, a letter a dimension: ids_BT is (batch, tokens).
    B rows of a batch      D embed_dim          V vocabulary, padded   C tokens of a chunk
    T tokens of a row      N attention heads    F feed_forward_dim     A micro-batches
    S tokens in the cache  H size of a head     W a window, T + 1      K top_k
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import orbax.checkpoint as ocp
import tiktoken
from absl import app, flags, logging
from flax import nnx
from jax import P, lax
from jax.sharding import AxisType, Mesh, NamedSharding, get_mesh


# ---- Flags: only the functions of the section Main read them -------------------------------------
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model. A field added here, with its flag, reaches model and checkpoint."""

    vocab_size: int
    maxlen: int = 256
    embed_dim: int = 256
    num_heads: int = 8
    feed_forward_dim: int = 256
    num_transformer_blocks: int = 8
    dropout: float = 0.0
    dtype: str = 'auto'

    @property
    def padded_vocab_size(self):
        """The next multiple of 128: GPT-2's 50,257 is odd, so that no `model` axis could cut it."""
        return math.ceil(self.vocab_size / 128) * 128


class UserError(ValueError):
    """What the user can mend: main prints it as one line, a notebook gets the exception."""


def require(condition, problem):
    """Raises a UserError unless the condition holds."""
    if not condition:
        raise UserError(problem)


flags.DEFINE_enum('mode', 'train', ['train', 'sample'], 'train or resume a run, or write with it')
flags.DEFINE_string('workdir', None, 'folder of the run; unset: runs/NAME, or to sample the newest')
flags.DEFINE_integer('keep', 3, 'newest checkpoints that are kept', 1)
flags.DEFINE_string('mesh', '-1,1', 'devices as batch,model, such as 4,2; -1: all that there are')
flags.DEFINE_integer('num_transformer_blocks', ModelConfig.num_transformer_blocks, 'blocks', 1)
flags.DEFINE_integer('maxlen', ModelConfig.maxlen, 'tokens of context; the grammar: 64', 2)
flags.DEFINE_integer('embed_dim', ModelConfig.embed_dim, 'width of embeddings and blocks', 1)
flags.DEFINE_integer('num_heads', ModelConfig.num_heads, 'attention heads of a block', 1)
flags.DEFINE_integer('feed_forward_dim', ModelConfig.feed_forward_dim, 'width inside the MLP', 1)
flags.DEFINE_float('dropout', ModelConfig.dropout, 'share dropped in training', 0, 0.9)
flags.DEFINE_enum('dtype', 'auto', ['auto', 'float32', 'bfloat16'], 'auto: float32 on CPUs')
# The text. The built-in grammar has some defaults of its own: GRAMMAR_DEFAULTS in Main.
flags.DEFINE_string('data', 'TinyStories-train.txt', 'UTF-8 text; if it is not there: grammar')
flags.DEFINE_string('tokenizer', 'gpt2', "bytes, words or one of tiktoken's; the grammar: words")
flags.DEFINE_integer('batch_size', 144, 'windows a step; the grammar: 4', 1)
flags.DEFINE_integer('accum_steps', None, 'micro-batches a step; unset: by batch and mesh', 1)
flags.DEFINE_integer('num_epochs', None, 'times each window is seen; unset: 1', 1)
flags.DEFINE_integer('max_steps', None, 'steps in all; unset: by num_epochs', 1, 2**31 - 1)
flags.DEFINE_float('learning_rate', 1e-3, 'peak, after warm-up and before the cosine', 0)
flags.DEFINE_integer('warmup_steps', 20, 'steps of rising learning rate', 0)
flags.DEFINE_float('weight_decay', 0.1, 'of AdamW, on matrices', 0)
flags.DEFINE_float('clip_norm', 1.0, 'largest gradient norm', 0)
flags.DEFINE_integer('seed', 42, 'of parameters, order, dropout and samples', 0, 2**32 - 1)
flags.DEFINE_integer('log_every', 10, 'steps between log lines', 1)
flags.DEFINE_integer('eval_every', 200, 'steps between validations; 0: only at the end', 0)
flags.DEFINE_integer('checkpoint_every', 200, 'steps between checkpoints; 0: only at the end', 0)
flags.DEFINE_integer('profile_steps', 0, 'steps to trace, after 5 steps of warm-up', 0)
flags.DEFINE_string('prompt', 'Once upon a time', 'beginning of the text')
flags.DEFINE_integer('num_samples', 1, 'texts to write', 1)
flags.DEFINE_integer('max_new_tokens', 0, 'tokens to write; 0: to end-of-text or maxlen in all', 0)
flags.DEFINE_integer('top_k', 10, 'draw from the k likeliest tokens; 0: from all', 0)
flags.DEFINE_float('temperature', 1.0, '0: always the likeliest token', 0)
flags.DEFINE_string('coordinator', None, 'HOST:PORT of the first of several processes, or auto')
flags.DEFINE_integer('num_processes', None, 'processes in all, each with its part of the mesh', 1)
flags.DEFINE_integer('process_id', None, 'number of this process, from 0', 0)
FLAGS = flags.FLAGS

# ---- Model: pre-LN transformer, each weight beside its split over the mesh -----------------------
# A primer on the mesh. One program runs for all devices. To the code an array is whole; in memory
# it is cut into pieces, one a device. P('batch', 'model') reads: dimension 0 is cut along the mesh
# axis `batch`, dimension 1 along `model`; None: not cut, so that devices hold copies. This sharding
# is part of the array's type ("explicit" axes), which JAX checks before anything runs. A product
# that sums over a cut dimension leaves a part of the sum on each device: out_sharding names the cut
# of the result, and the compiler puts in the all-reduce that adds the parts up. jax.reshard asks
# for another cut: the compiler puts in an all-gather, or takes a slice.

ROWS = P('batch', None, None)  # of activations (B, T, D): each device has some rows, whole
IN_FLOAT32 = {'preferred_element_type': jnp.float32}  # for products that add up in float32


def weight(rngs: nnx.Rngs, shape, *axes):
    """A parameter drawn from normal(0, 0.02), its dimension i cut along the mesh axis axes[i]."""
    mesh = jax.sharding.get_abstract_mesh()  # the one that create_mesh has set
    spec = list(axes)
    for i, axis in enumerate(axes):
        if axis and shape[i] % mesh.shape[axis] != 0:
            spec[i] = None  # it cannot be cut evenly
    # With out_sharding each device draws its own piece: the whole is never in one memory.
    normal = jax.random.normal(rngs.params(), shape, out_sharding=P(*spec))
    return nnx.Param(0.02 * normal)


def project(equation, x, w: nnx.Param, out_sharding):
    """einsum of activations with a parameter, which is float32, in the dtype of the activations."""
    return jnp.einsum(equation, x, w[...].astype(x.dtype), out_sharding=out_sharding)


def attention(q_BNTH, k_BNSH, v_BNSH, position=0):
    """Causal attention (B, N, T, H) of queries at position, position + 1... to keys at 0, 1..."""
    T, H = q_BNTH.shape[2:]
    S = k_BNSH.shape[2]
    scores_BNTS = jnp.einsum('bnth,bnsh->bnts', q_BNTH * H**-0.5, k_BNSH, **IN_FLOAT32)
    is_visible_TS = jnp.arange(S) <= position + jnp.arange(T)[:, None]
    scores_BNTS = jnp.where(is_visible_TS, scores_BNTS, -jnp.inf)
    # This softmax divides last: a step takes 3/4 as long as with jax.nn.dot_product_attention.
    max_BNT1 = lax.stop_gradient(scores_BNTS.max(axis=-1, keepdims=True))  # exp must not overflow
    exp_BNTS = jnp.exp(scores_BNTS - max_BNT1)
    sum_BNT1 = exp_BNTS.sum(axis=-1, keepdims=True)
    out_BNTH = jnp.einsum('bnts,bnsh->bnth', exp_BNTS.astype(v_BNSH.dtype), v_BNSH, **IN_FLOAT32)
    return (out_BNTH / sum_BNT1).astype(v_BNSH.dtype)


class TransformerBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Dropout acts only where rngs are given."""

    # Megatron's tensor parallelism (arXiv:1909.08053): `model` cuts the first matrix of a pair by
    # columns, the second by rows: one all-reduce a pair. `batch` cuts for storage alone: see gather.
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, N, F = config.embed_dim, config.num_heads, config.feed_forward_dim
        H = D // N
        self.norm1 = nnx.LayerNorm(D, dtype=config.dtype, rngs=rngs)
        self.qkv = weight(rngs, (D, 3, N, H), 'batch', None, 'model', None)
        self.out = weight(rngs, (N, H, D), 'model', None, 'batch')
        self.norm2 = nnx.LayerNorm(D, dtype=config.dtype, rngs=rngs)
        self.up = weight(rngs, (D, F), 'batch', 'model')
        self.down = weight(rngs, (F, D), 'model', 'batch')
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BTD, cache=None, position=0, rngs=None):
        """(x_BTD, (keys, values)), each (B, N, S, H). x stands at `position`, behind the cache."""
        drop = functools.partial(self.dropout, deterministic=rngs is None, rngs=rngs)
        heads = P('batch', None, None, 'model', None)
        qkv_BTINH = project('btd,dinh->btinh', self.norm1(x_BTD), self.qkv, heads)  # I: q, k or v
        q_BNTH, k_BNSH, v_BNSH = jnp.unstack(qkv_BTINH.swapaxes(1, 3), axis=2)
        if cache is not None:
            keys, values = cache
            k_BNSH = lax.dynamic_update_slice_in_dim(keys, k_BNSH, position, axis=2)
            v_BNSH = lax.dynamic_update_slice_in_dim(values, v_BNSH, position, axis=2)
        out_BNTH = attention(q_BNTH, k_BNSH, v_BNSH, position)
        x_BTD += drop(project('bnth,nhd->btd', out_BNTH, self.out, ROWS))  # all-reduce over `model`
        up_BTF = project('btd,df->btf', self.norm2(x_BTD), self.up, P('batch', None, 'model'))
        x_BTD += drop(project('btf,fd->btd', nnx.relu(up_BTF), self.down, ROWS))  # and another
        return x_BTD, (k_BNSH, v_BNSH)


class TokenAndPositionEmbedding(nnx.Module):
    """The sum of a learned vector for each token and one for each position."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = config.padded_vocab_size, config.embed_dim
        self.token_emb = weight(rngs, shape, 'batch', 'model')
        self.pos_emb = weight(rngs, (config.maxlen, config.embed_dim), None, 'batch')
        self.dtype = config.dtype

    def __call__(self, ids_BT, position=0):
        token_BTD = self.token_emb[...].at[ids_BT].get(out_sharding=ROWS)
        pos_TD = lax.dynamic_slice_in_dim(self.pos_emb[...], position, ids_BT.shape[1])
        return (token_BTD + pos_TD).astype(self.dtype)


class MiniGPT(nnx.Module):
    """Everything up to the output layer, which loss and sampler apply in their own ways."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding_layer = TokenAndPositionEmbedding(config, rngs)
        blocks = [TransformerBlock(config, rngs) for _ in range(config.num_transformer_blocks)]
        self.transformer_blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(config.embed_dim, dtype=config.dtype, rngs=rngs)
        shape = config.padded_vocab_size, config.embed_dim
        self.output_layer = weight(rngs, shape, 'model', 'batch')

    def __call__(self, ids_BT, caches=None, position=0, rngs=None):
        """(x_BTD, a cache for each block). The logits would be x @ output_layer.T, (B, T, V)."""
        caches = list(caches or [None] * len(self.transformer_blocks))
        x_BTD = self.embedding_layer(ids_BT, position)
        for i, block in enumerate(self.transformer_blocks):
            x_BTD, caches[i] = block(x_BTD, caches[i], position, rngs)
        return self.norm(x_BTD), caches


def create_model(config: ModelConfig, seed=0):
    """A MiniGPT on the mesh that create_mesh has set."""
    if config.dtype == 'auto':
        platform = get_mesh().devices.flat[0].platform
        config = dataclasses.replace(config, dtype='float32' if platform == 'cpu' else 'bfloat16')
    # jit runs the function once with tracers in place of arrays, compiles what they record, and
    # keeps the program for these shapes. It takes a Module apart into arrays and makes a new one of
    # the results. So one Param under two names comes out as two, which learn apart (to tie weights,
    # make one name a property), and an nnx.Rngs that goes through jit or jax.checkpoint is a copy.
    return jax.jit(lambda: MiniGPT(config, nnx.Rngs(seed)))()


def gather(model: MiniGPT):
    """The model with its parameters whole over `batch`, as the forward pass needs them."""

    # All at once and in float32: the memory of ZeRO-2. FSDP would gather block by block.
    def gather_parameter(a):
        spec = jax.typeof(a).sharding.spec  # stored P('batch', 'model') -> used P(None, 'model'):
        spec = [None if axis == 'batch' else axis for axis in spec]  # an all-gather over `batch`
        return jax.reshard(a, P(*spec))

    return jax.tree.map(gather_parameter, model)


# ---- Data: one stream of token ids in a memory-mapped file, cut into windows; nothing is padded --
END = '<|endoftext|>'
WORDS = r' ?[^\W\d_]+| ?[^\s\w]|\s|\d|_'  # a word with the space before it, or one character

STORY = (  # The built-in grammar: 64 tokens, in which each of ten words is one of eight.
    'Once upon a time there was a {mood} {animal} named {name}. {name} lived in the {place} '
    'and loved to {play}. One day {name} found a {color} {thing} near the {place}. Then a '
    '{feeling} {friend} came by. {name} gave the {color} {thing} to the {friend}. The '
    '{friend} was not {feeling} any more and they {deed} until the night.'
)
CHOICES = {
    'mood': 'shy bold glad kind wise calm lazy tiny',
    'animal': 'dog cat fox hen bear duck frog mouse',
    'name': 'Max Lily Tom Mia Sam Zoe Ben Anna',
    'place': 'park town farm zoo yard barn wood cave',
    'play': 'run jump swim climb dance sing dig hide',
    'color': 'red blue green gray pink tan black gold',
    'thing': 'ball key cake hat cup pen coin bell',
    'feeling': 'sad lost tired cold weak sick hurt mad',
    'friend': 'bird wolf pony goat pig crab bee owl',
    'deed': 'sang hid talked danced ran sat ate played',
}
ENTROPY = 10 * math.log(8) / 64  # nats a token: no model can have a lower loss


@contextlib.contextmanager
def replacing(path: Path):
    """Gives a path to write to, which then takes the place of `path`: whole or not at all."""
    part = path.with_name(f'{path.name}.{os.getpid()}.part')
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_grammar(path: Path):
    """Writes 2,112 stories of the grammar, always the same: 2,048 to train on, 64 held out."""
    rng = random.Random(0)
    stories = []
    for _ in range(2112):
        words = {slot: rng.choice(choices.split()) for slot, choices in CHOICES.items()}
        stories.append(STORY.format(**words) + END)
    with replacing(path) as part:
        part.write_text('\n'.join(stories))


def file_stories(path: Path):
    """Yields the stories of a UTF-8 text, which END separates. A story is in memory as a whole."""
    text = ''
    with open(path, encoding='utf-8-sig') as file:  # any line ending, with or without a BOM
        blocks = iter(lambda: file.read(2**24), '')
        for block in itertools.chain(blocks, [END]):  # END: so that the last story ends too
            *stories, text = (text + block).split(END)
            yield from filter(None, map(str.strip, stories))


def common_words(stories):
    """The 4,096 most frequent words of the first 10,000 stories."""
    counts = collections.Counter()
    for story in itertools.islice(stories, 10000):
        counts.update(word for word in re.findall(WORDS, story) if len(word) > 1)
    return [word for word, _ in counts.most_common(4096)]


def load_tokenizer(name, words=()):
    """A tiktoken.Encoding: one of tiktoken's own, or 256 bytes and `words` as tokens."""
    if name in ('bytes', 'words'):
        tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
        ranks = {token: i for i, token in enumerate(tokens)}
        special = {END: len(tokens)}
        return tiktoken.Encoding(name, pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special)
    try:
        return tiktoken.get_encoding(name)
    except (ValueError, OSError) as error:  # no such name, or no network to fetch it from
        problem = f'--tokenizer={name}: {error!r:.200}'
        raise UserError(
            f'{problem}. Without a network: words, bytes, TIKTOKEN_CACHE_DIR'
        ) from error


def load_tokens(text: Path, tokenizer, workdir: Path):
    """(the ids of a text, memory-mapped: end, story, end, story, end; the digest of the text)."""
    with open(text, 'rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()[:16]
    folder = text.parent if os.access(text.parent, os.W_OK) else workdir
    path = (
        folder / f'{text.stem}.{tokenizer.name}.{digest}.tokens'
    )  # delete it if the reader changes
    dtype = np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32
    end = tokenizer.eot_token
    if jax.process_index() == 0 and not path.exists():
        stories = file_stories(text)
        with replacing(path) as part, open(part, 'wb') as file:
            file.write(np.array([end], dtype))
            while batch := list(itertools.islice(stories, 512)):
                for ids in tokenizer.encode_ordinary_batch(batch):
                    file.write(np.array([*ids, end], dtype))
    while not path.exists():  # the other processes wait for process 0
        time.sleep(1)
    return np.memmap(path, dtype, 'r'), digest


def split_windows(ids, maxlen, batch_size):
    """(training, held-out) windows of ids, (n, W) views. Held out is the last tenth, at most 64."""
    n = (ids.size - 1) // maxlen
    training = n - min(64, math.ceil(n / 10))
    problem = f'{training} windows of {maxlen} tokens are fewer than --batch_size={batch_size}'
    require(training >= batch_size, f'{problem}: lower it or --maxlen, or add text.')
    windows = np.lib.stride_tricks.sliding_window_view(ids, maxlen + 1)[::maxlen]  # 1 shared token
    return windows[:training], windows[training:]


def training_batches(windows, batch_size, seed):
    """A sequence whose item n is the (B, W) batch of step n: seed and step alone decide it."""
    dataset = grain.MapDataset.source(windows).seed(seed)
    return dataset.shuffle().repeat(2**31).batch(batch_size)  # in another order at each repeat


def to_devices(ids_BW):
    """The batch, cut over `batch`. Each process hands over only the rows that its devices hold."""
    ids_BW = np.asarray(ids_BW, np.int32)
    sharding = NamedSharding(get_mesh(), P('batch', None))
    return jax.make_array_from_callback(ids_BW.shape, sharding, lambda index: ids_BW[index])


# ---- Mesh: (batch, model) devices, simulated where a machine has only CPUs -----------------------
def create_mesh(text='-1,1', num_processes=1):
    """Makes the mesh that --mesh describes and sets it as the current one, which the rest uses."""
    is_valid = re.fullmatch(r'(-1|[1-9]\d*),(-1|[1-9]\d*)', text) and text != '-1,-1'
    require(is_valid, f'--mesh={text} is not batch,model, such as 4,2, or -1,2 for all devices.')
    batch, model = map(int, text.split(','))
    simulated = min(abs(batch * model) // num_processes, 256)  # a -1 counts as 1
    if simulated > max(1, jax.config.jax_num_cpu_devices):
        with contextlib.suppress(RuntimeError):  # JAX has been used: its devices stay as they are
            jax.config.update('jax_num_cpu_devices', simulated)
    devices = jax.device_count()
    batch = devices // model if batch == -1 else batch
    model = devices // batch if model == -1 else model
    may_be_fewer = jax.devices()[0].platform == 'cpu' and num_processes == 1
    fits = batch * model == devices or (may_be_fewer and 0 < batch * model < devices)
    require(fits, f'--mesh={text} does not fit {devices} devices: use --mesh=-1,1 for all of them.')
    mesh = jax.make_mesh((batch, model), ('batch', 'model'), axis_types=(AxisType.Explicit,) * 2)
    jax.set_mesh(mesh)  # Explicit: shardings are part of types, see the primer
    return mesh


def check_sizes(config: ModelConfig, mesh: Mesh, batch_size, accum_steps=1):
    """Raises unless every size divides by what splits it."""
    batch, model = mesh.devices.shape
    require(128 % model == 0, f'--mesh={batch},{model}: model must divide 128: use 1, 2, 4 or 8.')
    for name, size, by, parts in [
        ('--batch_size', batch_size, 'batch axis (x accum_steps)', batch * accum_steps),
        ('--embed_dim', config.embed_dim, '--num_heads', config.num_heads),
        ('--num_heads', config.num_heads, 'model axis', model),
        ('--feed_forward_dim', config.feed_forward_dim, 'model axis', model),
    ]:
        fix = f'use {math.ceil(size / parts) * parts}'
        require(size % parts == 0, f'{name}={size} is not divisible by {by}={parts}: {fix}.')


def largest_divisor(n, limit):
    """The largest divisor of n that is not above limit, or 1."""
    return max(d for d in range(1, max(1, limit) + 1) if n % d == 0)


def choose_accum_steps(mesh: Mesh, batch_size, maxlen):
    """Micro-batches a step. Shapes and mesh alone decide, so that a resume repeats the choice."""
    is_cpu = mesh.devices.flat[0].platform == 'cpu'  # 2 cores are fastest with 2,048 tokens at once
    tokens = max(512, 2048 // mesh.size) if is_cpu else 65536  # of a device in a micro-batch
    rows = batch_size // mesh.shape['batch']
    return rows // largest_divisor(rows, tokens // maxlen)


# ---- Train step: the loss never holds all logits (B, T, V), and finds its gradients on the way ---
CHUNK = 512  # tokens whose logits exist at a time; from 128 to 2048 made no difference on CPUs


def token_losses(x_BTD, w_VD, y_BT, vocab_size):
    """Softmax cross-entropy: (losses_BT in nats, the gradients of their sum dx_BTD and dw_VD).

    For a token with activations x (D,), output layer w (V, D) and right id y:
        logits  = w @ x                         never whole: a chunk of tokens at a time
        loss    = log(sum(exp(logits))) - logits[y]
        dlogits = softmax(logits) - onehot(y)   known with the loss, and so are
        dx, dw  = dlogits @ w, outer(dlogits, x)
    """
    # Inside shard_map the code is that of one device: it sees only its pieces.
    local = functools.partial(local_token_losses, vocab_size=vocab_size)
    x, w, y = ROWS, P('model', None), P('batch', None)
    return jax.shard_map(local, in_specs=(x, w, y), out_specs=(y, x, w))(x_BTD, w_VD, y_BT)


def local_token_losses(x_BTD, w_VD, y_BT, vocab_size):
    """token_losses on one device, with its rows of x and y, and its part of the vocabulary."""
    V, D = w_VD.shape
    first_id = lax.axis_index('model') * V
    is_real_V = first_id + jnp.arange(V) < vocab_size  # the others pad the vocabulary
    is_here_BT = (y_BT >= first_id) & (y_BT < first_id + V)
    row_BT = jnp.where(is_here_BT, y_BT - first_id, V)  # V is out of bounds: read as 0, not written
    kernel_VD = w_VD.astype(x_BTD.dtype)

    def add_chunk(dw_VD, chunk):
        x_CD, row_C = chunk
        logits_CV = jnp.matmul(x_CD, kernel_VD.T, **IN_FLOAT32)
        logits_CV = jnp.where(is_real_V, logits_CV, -jnp.inf)
        max_C = lax.pmax(logits_CV.max(axis=-1), 'model')  # over all devices' vocabulary
        exp_CV = jnp.exp(logits_CV - max_C[:, None])
        target_CD = kernel_VD.at[row_C].get(mode='fill', fill_value=0)  # w[y]
        target_C = jnp.einsum('cd,cd->c', x_CD, target_CD, **IN_FLOAT32)
        sum_C, target_C = lax.psum((exp_CV.sum(axis=-1), target_C), 'model')
        loss_C = max_C + jnp.log(sum_C) - target_C
        # dx = softmax @ w - w[y], where softmax = exp / sum: no array of dlogits is built.
        exp_CV = exp_CV.astype(x_CD.dtype)
        dx_CD = lax.psum((exp_CV @ kernel_VD) / sum_C[:, None] - target_CD, 'model')
        scaled_x_CD = (x_CD / sum_C[:, None]).astype(x_CD.dtype)
        dw_VD += jnp.matmul(exp_CV.T, scaled_x_CD, **IN_FLOAT32)
        return dw_VD, (loss_C, dx_CD.astype(x_CD.dtype))

    size = largest_divisor(y_BT.size, CHUNK)
    chunks = x_BTD.reshape(-1, size, D), row_BT.reshape(-1, size)
    # "varying" tells shard_map that each device adds up a sum of its own.
    zeros_VD = lax.pcast(jnp.zeros(w_VD.shape), ('batch', 'model'), to='varying')
    dw_VD, (losses, dx) = lax.scan(add_chunk, zeros_VD, chunks)  # a loop, compiled once
    dw_VD = dw_VD.at[row_BT].add(-x_BTD.astype(jnp.float32), mode='drop')  # the onehot's part
    dw_VD = lax.psum(dw_VD, 'batch')
    return losses.reshape(y_BT.shape), dx.reshape(x_BTD.shape), dw_VD


@jax.custom_gradient
def cross_entropy(x_BTD, w_VD, y_BT, vocab_size):
    """The sum of token_losses in nats. Its backward pass only scales the gradients found there."""
    losses_BT, dx_BTD, dw_VD = token_losses(x_BTD, w_VD, y_BT, vocab_size)

    def backward(g):
        return (g * dx_BTD).astype(dx_BTD.dtype), g * dw_VD, None, None

    return losses_BT.sum(), backward


def loss_fn(model, ids_BW, dropout_key=None):
    """Mean loss over the windows, nats a token: each token is predicted from those before it."""
    rngs = None if dropout_key is None else nnx.Rngs(dropout=dropout_key)
    x_BTD, _ = model(ids_BW[:, :-1], rngs=rngs)
    y_BT = ids_BW[:, 1:]
    total = cross_entropy(x_BTD, model.output_layer[...], y_BT, model.config.vocab_size)
    return total / y_BT.size


def learning_rate_schedule(peak, warmup_steps, steps):
    """The rate as a function of the step: it rises to the peak, then falls to a tenth of it."""
    warmup = min(warmup_steps, steps - 1)
    return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, steps, peak / 10)


def create_optimizer(model, learning_rate, weight_decay=0.1, clip_norm=1.0):
    """AdamW after clipping by the global norm. learning_rate is a number or a schedule."""
    is_matrix = functools.partial(jax.tree.map, lambda a: a.ndim > 1)
    # optax treats each number by itself, so its state is cut as the parameters are. An optimizer
    # that multiplies matrices, such as Muon, has to run inside jax.sharding.auto_axes.
    adamw = optax.adamw(learning_rate, b2=0.95, weight_decay=weight_decay, mask=is_matrix)
    clipped_adamw = optax.chain(optax.clip_by_global_norm(clip_norm), adamw)
    return jax.jit(lambda model: nnx.Optimizer(model, clipped_adamw, wrt=nnx.Param))(model)


# Donated arguments give their memory to the results: after the call the old arrays are gone.
@jax.jit(donate_argnums=(0, 1), static_argnames='accum_steps')
def train_step(model, optimizer, ids_BW, key, accum_steps=1):
    """One update: (model, optimizer, {'loss', 'grad_norm'}), the loss in nats a token."""
    key = jax.random.fold_in(key, optimizer.step[...])  # a key of this step: dropout is repeatable
    whole = gather(model)

    def add_micro_batch(sums, micro_batch):
        loss_and_grads = jax.value_and_grad(loss_fn)(whole, *micro_batch)
        return jax.tree.map(add_as_stored, sums, loss_and_grads), None

    def add_as_stored(total, part):
        # The other half of gather: the sum of the gradients is cut as the parameters are stored.
        return total + jax.reshard(part, jax.typeof(total).sharding.spec)

    # Row i goes to micro-batch i % accum_steps, so that no row moves to another device.
    ids_BAW = ids_BW.reshape(-1, accum_steps, ids_BW.shape[1], out_sharding=ROWS)
    micro_batches = ids_BAW.swapaxes(0, 1), jax.random.split(key, accum_steps)
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, model)
    sums, _ = lax.scan(add_micro_batch, zeros, micro_batches)
    loss, grads = jax.tree.map(lambda total: total / accum_steps, sums)
    optimizer.update(model, grads)  # writes into both, which inside jit are copies: return them
    grad_norm = optax.tree.norm(jax.tree.leaves(grads))
    return model, optimizer, {'loss': loss, 'grad_norm': grad_norm}


@jax.jit
def eval_step(model, ids_BW):
    """Mean loss of each window, (B,) nats a token, without dropout."""
    model = gather(model)
    x_BTD, _ = model(ids_BW[:, :-1])
    w_VD, y_BT = model.output_layer[...], ids_BW[:, 1:]
    losses_BT, *_ = token_losses(x_BTD, w_VD, y_BT, model.config.vocab_size)  # unused: not computed
    return jax.reshard(losses_BT.mean(axis=-1), P())


# ---- Reports: log lines, metrics.csv, loss.png and the profile -----------------------------------
COLUMNS = ('step', 'loss', 'grad_norm', 'learning_rate', 'tokens_per_s', 'val_loss')
PEAKS = {  # bfloat16 TFLOP/s of a device, as its maker gives them: MFU is a share of them
    'NVIDIA H100 80GB HBM3': 989,
    'NVIDIA H200': 989,
    'TPU v4': 275,
    'TPU v5 lite': 197,
    'TPU v5': 459,
    'TPU v6 lite': 918,
}


def say(text, file=None):
    """Prints in process 0 alone."""
    if jax.process_index() == 0:
        with contextlib.suppress(BrokenPipeError):  # of `| tee`, which Ctrl-C ends first
            print(text, file=file, flush=True)


class Log:
    """Lines on stdout, rows of metrics.csv, and loss.png. Step n is the state after n updates."""

    def __init__(self, workdir: Path, start, total, tokens, entropy=None):
        self.workdir, self.total = workdir, total
        self.tokens = tokens  # of a step
        self.entropy = entropy  # the lowest loss that there can be, where it is known
        self.path = workdir / 'metrics.csv'
        self.restart_clock(start)
        if jax.process_index() == 0:
            lines = self.path.read_text().splitlines() if start and self.path.exists() else []
            rows = [line for line in lines[1:] if int(line.split(',')[0]) <= start]
            with replacing(self.path) as part:
                part.write_text('\n'.join([','.join(COLUMNS), *rows, '']))

    def restart_clock(self, step):
        """Called after each pause, so that no pause counts as part of a step."""
        self.clock, self.clock_step = time.perf_counter(), step

    def training(self, step, metrics, learning_rate):
        """Waits for a step's numbers and reports them. Raises if they are not finite."""
        loss, grad_norm = metrics['loss'], metrics['grad_norm']
        problem = f'step {step}: loss {loss}, gradient {grad_norm}: not saved'
        require(np.isfinite(loss + grad_norm), f'{problem}. Try a lower --learning_rate.')
        seconds = (time.perf_counter() - self.clock) / (step - self.clock_step)
        speed = round(self.tokens / seconds, 1)
        line = f'step {step}/{self.total} | loss {loss:.4f} | grad {grad_norm:.2f}'
        left = f'{(self.total - step) * seconds / 60:.1f} min left'
        say(f'{line} | lr {learning_rate:.1e} | {speed:,.0f} tokens/s | {left}')
        self.write(step=step, **metrics, learning_rate=learning_rate, tokens_per_s=speed)
        self.restart_clock(step)

    def validation(self, step, val_loss, story):
        """Reports the loss on held-out windows and a story, and draws the curve anew."""
        entropy = f' | entropy {self.entropy:.4f}' if self.entropy else ''
        say(f'\n--- step {step} | val {val_loss:.4f}{entropy} ---\n{story}\n')
        self.write(step=step, val_loss=val_loss)
        if jax.process_index() == 0:
            self.plot()
        self.restart_clock(step)

    def write(self, **row):
        """Adds a row to metrics.csv. Its other fields stay empty."""
        if jax.process_index() == 0:
            with open(self.path, 'a') as file:
                print(*[row.get(column, '') for column in COLUMNS], sep=',', file=file)

    def plot(self):
        """Draws loss.png from metrics.csv."""
        table = np.genfromtxt(self.path, delimiter=',', names=True, ndmin=1)
        figure = matplotlib.figure.Figure(figsize=(8, 5), layout='constrained')  # needs no display
        axes = figure.add_subplot(xlabel='step', ylabel='loss (nats a token)', yscale='log')
        for column, style in [('loss', '0.5'), ('val_loss', 'ko')]:
            rows = table[np.isfinite(table[column])]  # an empty field is read as nan
            axes.plot(rows['step'], rows[column], style, label=column)
        if self.entropy:
            axes.axhline(self.entropy, color='k', linestyle=':', label='entropy')
        axes.yaxis.set(major_formatter='{x:g}', minor_formatter='{x:g}')
        axes.legend()
        with replacing(self.workdir / 'loss.png') as part:
            figure.savefig(part, dpi=120, format='png')


def step_flops(config: ModelConfig, tokens):
    """FLOPs of a step's matmuls, masked scores included. The backward pass is twice the forward."""
    D, F = config.embed_dim, config.feed_forward_dim
    block = 4 * D**2 + 2 * D * F + 2 * config.maxlen * D  # multiply-adds a token
    return 6 * tokens * (config.num_transformer_blocks * block + config.vocab_size * D)


class Profiler:
    """Traces num_steps steps, after 5 of warm-up, and prints what they spent their time on."""

    def __init__(self, log: Log, config: ModelConfig, num_steps):
        self.log, self.config, self.start = log, config, log.clock_step
        self.traced = range(self.start + 5, self.start + 5 + num_steps)
        problem = f'--profile_steps={num_steps} needs --max_steps={self.traced.stop} or more'
        require(not num_steps or self.traced.stop <= log.total, f'{problem}: it is {log.total}.')
        self.folder = log.workdir / f'profile/{jax.process_index()}'

    @contextlib.contextmanager
    def step(self, step):
        """Stands around each training step."""
        if step in self.traced[:1]:
            jax.block_until_ready(jax.live_arrays())  # until the steps before have ended
            jax.profiler.start_trace(self.folder)
            self.clock = time.perf_counter()
            self.log.restart_clock(step)
        with jax.profiler.StepTraceAnnotation('train', step_num=step):
            yield
        if step == self.start:  # the first call has compiled the step
            self.log.restart_clock(step)
        if step in self.traced[-1:]:
            jax.block_until_ready(jax.live_arrays())
            seconds = time.perf_counter() - self.clock
            jax.profiler.stop_trace()
            self.report(seconds)
            self.log.clock += time.perf_counter() - self.clock - seconds  # the pause

    def report(self, seconds):
        """Prints the speed, and the shares of the time: of the devices, and of the host's input."""
        events, input_ns = [], 0
        path = max(self.folder.rglob('*.xplane.pb'), key=os.path.getmtime)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for event in itertools.chain.from_iterable(line.events for line in plane.lines):
                stats = dict(event.stats)
                operation = stats.get('hlo_op', '')
                if event.name == 'input':  # see train
                    input_ns += event.duration_ns
                elif operation and not re.match('while|call|cond', operation):  # these hold others
                    device = plane.name, stats.get('device_ordinal', 0)
                    events.append((device, event.start_ns, event.end_ns, operation))
        spent, ends = collections.Counter(), collections.Counter()
        for device, start, end, operation in sorted(events):
            is_collective = bool(re.match('all-|reduce-scatter|collective-', operation))
            spent[is_collective] += max(0, end - max(start, ends[device]))  # overlaps count once
            ends[device] = max(end, ends[device])
        steps, tokens, devices = len(self.traced), self.log.tokens, get_mesh().devices
        total_ns = 1e9 * seconds * len(get_mesh().local_devices)
        compute, collectives = spent[False] / total_ns, spent[True] / total_ns
        step_s = seconds / steps
        example_ms = 1e3 * step_s * self.config.maxlen / tokens
        teraflops = step_flops(self.config, tokens) / step_s / 1e12
        peak = PEAKS.get(devices.flat[0].device_kind)
        mfu = f'{teraflops / devices.size / peak:.0%}' if peak else 'unknown'
        say(
            f'\n--- {steps} steps traced: {path} ---\n'
            f'{1e3 * step_s:.1f} ms a step, {example_ms:.2f} ms an example | '
            f'{tokens / step_s:,.0f} tokens/s | {teraflops:.3f} TFLOP/s | MFU {mfu}\n'
            f'compute {compute:.1%} | collectives {collectives:.1%} | '
            f'idle {1 - compute - collectives:.1%} | input {input_ns / seconds / 1e9:.1%}\n'
        )


# ---- Sampler: the prompt takes one pass, then each token one against the KV cache; compiled once -
@jax.jit(static_argnames='top_k')
def generate_tokens(model, ids_BT, start, stop, end, seed, temperature, top_k):
    """ids_BT filled from `start` to `stop`, or until each row has an `end` after its first id."""
    model = gather(model)
    vocab_size = model.config.vocab_size

    def is_unfinished(state):
        position, ids_BT, _ = state
        has_ended_B = (ids_BT[:, 1:] == end).any(axis=1)
        return (position < stop) & ~has_ended_B.all()

    def write_token(state):
        position, ids_BT, caches = state
        last_B1 = lax.dynamic_slice_in_dim(ids_BT, position - 1, 1, axis=1)
        x_B1D, caches = model(last_B1, caches, position - 1)
        x_B1D = x_B1D.astype(jnp.float32)
        logits_BV = project('btd,vd->bv', x_B1D, model.output_layer, P('batch', 'model'))
        logits_BV = jax.reshard(logits_BV, P())[:, :vocab_size]  # without the ids that pad
        top_BK, id_BK = lax.top_k(logits_BV, min(top_k or vocab_size, vocab_size))
        key = jax.random.fold_in(jax.random.key(seed), position)
        scale = jnp.maximum(temperature, 1e-9)  # 0 would divide by 0: so small a number is as sure
        choice_B = jax.random.categorical(key, top_BK / scale)
        token_B1 = jnp.take_along_axis(id_BK, choice_B[:, None], axis=1)
        token_B1 = jax.reshard(token_B1, P('batch', None))
        ids_BT = lax.dynamic_update_slice_in_dim(ids_BT, token_B1, position, axis=1)
        return position + 1, ids_BT, caches

    _, caches = model(ids_BT)  # of the whole row: from `start` on they are written over
    _, ids_BT, _ = lax.while_loop(is_unfinished, write_token, (start, ids_BT, caches))
    return jax.reshard(ids_BT, P())


def encode_prompt(tokenizer, prompt, maxlen):
    """The ids of end-of-text, which stands before every story of the stream, and of the prompt."""
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)]
    require(len(ids) < maxlen, f'--prompt of {len(ids)} tokens is too long for maxlen={maxlen}.')
    return ids


def generate_text(
    model, tokenizer, prompt, num_samples=1, max_new_tokens=0, top_k=10, temperature=1.0, seed=42
):
    """A list of texts that begin with the prompt. The flags of the same names explain the rest."""
    maxlen = model.config.maxlen
    prompt_ids = encode_prompt(tokenizer, prompt, maxlen)
    start = len(prompt_ids)
    stop = min(maxlen, start + (max_new_tokens or maxlen))
    batch = get_mesh().shape['batch']
    ids_BT = np.zeros((math.ceil(num_samples / batch) * batch, maxlen))
    ids_BT[:, :start] = prompt_ids
    ids_BT, end = to_devices(ids_BT), tokenizer.eot_token
    ids_BT = generate_tokens(model, ids_BT, start, stop, end, seed, temperature, top_k)
    known = set(map(tokenizer.encode_single_token, tokenizer.token_byte_values()))
    texts = []
    for row in np.asarray(ids_BT)[:num_samples, 1:stop].tolist():
        ids = itertools.takewhile(lambda i: i in known, row)  # end-of-text is not
        text = tokenizer.decode(list(ids))
        texts.append(text.rstrip('\ufffd'))  # without half a character at the end
    return texts


# ---- Checkpoint: model, optimizer, settings; data order and keys follow from seed and step -------
def open_checkpoints(workdir: Path, keep=1, read_only=False):
    """An Orbax manager, which keeps the newest checkpoints and removes what a crash left half-made."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, read_only=read_only, cleanup_tmp_directories=not read_only
    )
    return ocp.CheckpointManager((workdir / 'checkpoints').absolute(), options=options)


def save(checkpoints, step, settings, model, optimizer):
    """Copies the arrays and returns; Orbax writes them to a temporary folder, then renames it."""
    args = ocp.args.Composite(
        settings=ocp.args.JsonSave(settings),
        model=ocp.args.StandardSave(nnx.state(model)),
        optimizer=ocp.args.StandardSave(nnx.state(optimizer)),
    )
    checkpoints.save(step, args=args, force=True)


def restore(checkpoints, **modules):
    """(step, settings) of the newest checkpoint, or (0, None); its arrays go into the modules."""
    step = checkpoints.latest_step()
    if step is None:
        return 0, None
    args = {name: ocp.args.StandardRestore(nnx.state(module)) for name, module in modules.items()}
    args['settings'] = ocp.args.JsonRestore()
    restored = checkpoints.restore(step, args=ocp.args.Composite(**args))
    for name, module in modules.items():
        nnx.update(module, restored[name])  # cut as the module's arrays are, on whatever mesh
    return step, restored['settings']


# ---- Main: set-up, the training loop, and --mode=sample ------------------------------------------
GRAMMAR_DEFAULTS = {'tokenizer': 'words', 'maxlen': 64, 'batch_size': 4}
MODEL = [field.name for field in dataclasses.fields(ModelConfig) if field.name != 'vocab_size']
FIXED = [*MODEL, 'tokenizer', 'batch_size', 'seed']  # what a resumed run must not change
SAMPLING = ['prompt', 'num_samples', 'max_new_tokens', 'top_k', 'temperature', 'seed']
SIGNALS = []  # those that came: the loop saves and stops


def on_signal(number, frame):
    """Asks the loop to save and stop. A second signal ends the process at once."""
    SIGNALS.append(number)
    signal.signal(number, signal.SIG_DFL)
    os.write(2, b'stopping after this step; a second time stops at once, unsaved\n')


def flag_values(names):
    return {name: FLAGS[name].value for name in names}


class Run:
    """The run that the flags describe, checked and with its text tokenised, before it is built."""

    def __init__(self):
        mesh = create_mesh(FLAGS.mesh, FLAGS.num_processes or 1)
        batch, model = mesh.devices.shape
        text = Path(FLAGS.data).expanduser()
        is_grammar = FLAGS.data == 'grammar' or not (FLAGS['data'].present or text.exists())
        for name, value in GRAMMAR_DEFAULTS.items() if is_grammar else ():
            FLAGS.set_default(name, value)  # it leaves alone what the command line has set
        FLAGS.set_default('batch_size', math.ceil(FLAGS.batch_size / batch) * batch)
        B, T = FLAGS.batch_size, FLAGS.maxlen
        name = 'grammar' if is_grammar else text.resolve(strict=True).stem
        sizes = f'{FLAGS.num_transformer_blocks}x{FLAGS.embed_dim}-b{B}-s{FLAGS.seed}'
        self.workdir = Path(FLAGS.workdir or f'runs/{name}-{sizes}').expanduser()
        say(
            f'{name} -> {self.workdir} | mesh {batch},{model} of {mesh.devices.flat[0].device_kind}'
        )
        (self.workdir / 'checkpoints').mkdir(parents=True, exist_ok=True)
        if is_grammar:
            text = self.workdir / 'grammar.txt'
            write_grammar(text)
        words = common_words(file_stories(text)) if FLAGS.tokenizer == 'words' else []
        self.tokenizer = load_tokenizer(FLAGS.tokenizer, words)
        encode_prompt(self.tokenizer, FLAGS.prompt, T)  # raises now if it is too long
        self.config = ModelConfig(self.tokenizer.n_vocab, **flag_values(MODEL))
        check_sizes(self.config, mesh, B, FLAGS.accum_steps or 1)
        FLAGS.set_default('accum_steps', choose_accum_steps(mesh, B, T))
        ids, digest = load_tokens(text, self.tokenizer, self.workdir)
        self.training, self.held_out = split_windows(ids, T, B)
        steps = len(self.training) * (FLAGS.num_epochs or 1) // B
        if is_grammar and not FLAGS.num_epochs:
            steps = max(100, steps)  # fewer do not learn it, however large a batch is
        FLAGS.set_default('max_steps', steps)
        self.settings = flag_values(FIXED) | {'data': digest, 'words': words}
        self.entropy = ENTROPY if is_grammar and FLAGS.tokenizer == 'words' else None

    def start_or_resume(self, checkpoints):
        """(step, model, optimizer, schedule): new, or as the newest checkpoint has them."""
        _, saved = restore(checkpoints)  # the settings alone: they decide what may be built
        for name, value in self.settings.items() if saved else ():
            change = f'{name} {saved.get(name)!s:.20} -> {value!s:.20}'
            problem = f'{self.workdir} is another run: {change}. Set --workdir=NEW, or delete it.'
            require(value == saved.get(name), problem)
        model = create_model(self.config, FLAGS.seed)
        schedule = learning_rate_schedule(FLAGS.learning_rate, FLAGS.warmup_steps, FLAGS.max_steps)
        optimizer = create_optimizer(model, schedule, FLAGS.weight_decay, FLAGS.clip_norm)
        step, _ = restore(checkpoints, model=model, optimizer=optimizer)
        size = f'{FLAGS.batch_size} x {FLAGS.maxlen} tokens in {FLAGS.accum_steps} micro-batches'
        say(f'{optax.tree.size(model):,} parameters | step {step} of {FLAGS.max_steps}: {size}')
        return step, model, optimizer, schedule

    def evaluate(self, model):
        """(mean loss on the held-out windows in nats a token, a story)."""
        rows = FLAGS.batch_size // FLAGS.accum_steps
        n = len(self.held_out)
        # np.resize fills the last batch up with the first windows again. np.asarray waits for each
        # program: two at once on simulated devices could wait for each other's threads for ever.
        batches = np.resize(self.held_out, (math.ceil(n / rows), rows, FLAGS.maxlen + 1))
        losses = [np.asarray(eval_step(model, to_devices(batch))) for batch in batches]
        sampling = flag_values(SAMPLING) | {'num_samples': 1}
        return np.concatenate(losses)[:n].mean(), *generate_text(model, self.tokenizer, **sampling)


def train():
    """--mode=train: starts a run, or goes on with it, until its last step or a signal."""
    run = Run()
    checkpoints = open_checkpoints(run.workdir, FLAGS.keep)
    step, model, optimizer, schedule = run.start_or_resume(checkpoints)
    batches = training_batches(run.training, FLAGS.batch_size, FLAGS.seed)
    key = jax.random.key(FLAGS.seed)
    total, metrics, stop = FLAGS.max_steps, None, False
    log = Log(run.workdir, step, total, FLAGS.batch_size * FLAGS.maxlen, run.entropy)
    profiler = Profiler(log, run.config, FLAGS.profile_steps)

    def due(every):
        return step == total or (every > 0 and step % every == 0)

    if jax.process_count() == 1:  # else JAX listens to SIGTERM, for all processes
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
    if step == 0:
        log.validation(0, *run.evaluate(model))
    with checkpoints:  # whatever ends the loop, a save that is under way is finished
        while step < total and not stop:
            with profiler.step(step):
                with jax.profiler.TraceAnnotation('input'):
                    ids_BW = to_devices(batches[step])
                before = metrics
                model, optimizer, metrics = train_step(
                    model, optimizer, ids_BW, key, FLAGS.accum_steps
                )
                jax.block_until_ready(before)  # JAX does not wait: at most two steps are under way
            step += 1
            stop = bool(SIGNALS) or checkpoints.reached_preemption(step)
            is_saved = due(FLAGS.checkpoint_every) or stop
            if due(FLAGS.log_every) or is_saved:  # which refuses to save a loss that is not finite
                log.training(step, metrics, schedule(step - 1))
            if due(FLAGS.eval_every):
                log.validation(step, *run.evaluate(model))
            if is_saved:
                save(checkpoints, step, run.settings, model, optimizer)
                log.restart_clock(step)
    say(f'step {step} of {total}: saved in {run.workdir}')
    if stop:
        sys.exit(128 + (SIGNALS[0] if SIGNALS else signal.SIGTERM))


def sample():
    """--mode=sample: text to stdout. Model, settings and tokenizer come from the checkpoint."""
    found = Path('runs').glob('*/checkpoints/*')
    saved = sorted((path for path in found if path.name.isdigit()), key=os.path.getmtime)
    require(saved or FLAGS.workdir, 'There is no run in runs/: train first, or set --workdir.')
    workdir = Path(FLAGS.workdir or saved[-1].parents[1]).expanduser()
    mesh = create_mesh(FLAGS.mesh, FLAGS.num_processes or 1)
    checkpoints = open_checkpoints(workdir, read_only=True)
    step, settings = restore(checkpoints)
    require(step, f'{workdir} has no checkpoint to sample from: train first, or set --workdir.')
    tokenizer = load_tokenizer(settings['tokenizer'], settings['words'])
    config = ModelConfig(tokenizer.n_vocab, **{name: settings[name] for name in MODEL})
    check_sizes(config, mesh, batch_size=mesh.shape['batch'])
    model = create_model(config)
    restore(checkpoints, model=model)
    say(f'{workdir}, step {step}', file=sys.stderr)
    say('\n\n'.join(generate_text(model, tokenizer, **flag_values(SAMPLING))))


def main(argv):
    """Does what --mode says. What the user can mend ends in one line and exit status 1."""
    if len(argv) > 1:
        raise app.UsageError(f'Stray argument {argv[1]}: flags begin with --, as in --mesh=4,2.')
    logging.set_verbosity(logging.FATAL)  # Orbax logs what it also raises
    try:
        if FLAGS.coordinator or FLAGS.num_processes:
            address = None if FLAGS.coordinator == 'auto' else FLAGS.coordinator  # None: Slurm's
            jax.distributed.initialize(address, FLAGS.num_processes, FLAGS.process_id)
        train() if FLAGS.mode == 'train' else sample()
    except UnicodeDecodeError as error:
        sys.exit(f'--data={FLAGS.data} is not UTF-8 text ({error.reason}). Use gunzip or iconv?')
    except (UserError, OSError, jax.errors.JaxRuntimeError) as error:  # the last: no memory
        sys.exit(str(error).splitlines()[0])


if __name__ == '__main__':
    app.run(main)
