"""minigpt: train, sample, resume and profile a GPT in JAX and Flax NNX, on one device or many.

    python minigpt.py                                   # learns a small story language in minutes
    python minigpt.py --mesh=4,2 --batch_size=144       # TinyStories-train.txt, on 8 devices
    python minigpt.py --mode=sample --prompt='One day'  # writes with the newest run

The sections of this file:
    Flags        ModelConfig, and each flag with its default
    Model        primer on the mesh; TransformerBlock, TokenAndPositionEmbedding, MiniGPT
    Data         text -> file of token ids -> windows -> shuffled batches (Grain)
    Mesh         the grid of devices, simulated where there are only CPUs
    Train step   loss fused with the output layer, AdamW, gradient accumulation
    Reports      log lines, metrics.csv, loss.png, profile
    Sampler      top-k sampling with a KV cache, in one compiled loop
    Checkpoint   saved in the background, restored onto any mesh (Orbax)
    Main         set-up, the training loop, --mode=sample
The end of an array's name gives its shape, one letter for each dimension: ids_BT is (B, T).
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


# ---- Flags: only the functions of Main read them, so that a notebook needs none ------------------
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model. A field added here, with a flag, reaches the model and checkpoints."""

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
        """The next multiple of 128: GPT-2's 50,257 is odd, so no `model` axis could split it."""
        return math.ceil(self.vocab_size / 128) * 128


class UserError(ValueError):
    """An error that the user can fix. main prints it as one line; a notebook gets an exception."""


def require(condition, problem):
    """Raises a UserError unless the condition holds."""
    if not condition:
        raise UserError(problem)


flags.DEFINE_enum('mode', 'train', ['train', 'sample'], 'train or resume a run, or write with it')
flags.DEFINE_string('workdir', None, 'folder of the run; default: runs/NAME, or the newest')
flags.DEFINE_integer('keep', 3, 'number of newest checkpoints to keep', 1)
flags.DEFINE_string('mesh', '-1,1', 'devices as batch,model, such as 4,2; -1: all there are')
flags.DEFINE_integer('num_transformer_blocks', ModelConfig.num_transformer_blocks, 'blocks', 1)
flags.DEFINE_integer('maxlen', ModelConfig.maxlen, 'tokens of context; grammar: 64', 2)
flags.DEFINE_integer('embed_dim', ModelConfig.embed_dim, 'width of the activations', 1)
flags.DEFINE_integer('num_heads', ModelConfig.num_heads, 'attention heads in a block', 1)
flags.DEFINE_integer('feed_forward_dim', ModelConfig.feed_forward_dim, 'width inside the MLP', 1)
flags.DEFINE_float('dropout', ModelConfig.dropout, 'dropout rate in training', 0, 0.9)
flags.DEFINE_enum('dtype', 'auto', ['auto', 'float32', 'bfloat16'], 'auto: float32 on CPUs')
# The built-in grammar has three defaults of its own.
GRAMMAR_DEFAULTS = {'tokenizer': 'words', 'maxlen': 64, 'batch_size': 4}
flags.DEFINE_string('data', 'TinyStories-train.txt', 'UTF-8 text; grammar if it is missing')
flags.DEFINE_string('tokenizer', 'gpt2', "bytes, words or one of tiktoken's; grammar: words")
flags.DEFINE_integer('batch_size', 144, 'windows in a step; grammar: 4', 1)
flags.DEFINE_integer('accum_steps', None, 'micro-batches in a step; default: by sizes and mesh', 1)
flags.DEFINE_integer('num_epochs', None, 'times each window is seen; default: 1', 1)
flags.DEFINE_integer('max_steps', None, 'steps in all; default: by num_epochs', 1, 2**31 - 1)
flags.DEFINE_float('learning_rate', 1e-3, 'peak, after warm-up and before the cosine', 0)
flags.DEFINE_integer('warmup_steps', 20, 'steps over which the learning rate rises', 0)
flags.DEFINE_float('weight_decay', 0.1, "AdamW's weight decay, on matrices", 0)
flags.DEFINE_float('clip_norm', 1.0, 'largest gradient norm; 0: no clipping', 0)
flags.DEFINE_integer('seed', 42, 'random seed of everything', 0, 2**32 - 1)
flags.DEFINE_integer('log_every', 10, 'steps between log lines', 1)
flags.DEFINE_integer('eval_every', 200, 'steps between validations; 0: only at the end', 0)
flags.DEFINE_integer('checkpoint_every', 200, 'steps between checkpoints; 0: only at the end', 0)
flags.DEFINE_integer('profile_steps', 0, 'steps to trace, after 5 steps of warm-up', 0)
flags.DEFINE_string('prompt', 'Once upon a time', 'how the text begins')
flags.DEFINE_integer('num_samples', 1, 'texts to write', 1)
flags.DEFINE_integer('max_new_tokens', 0, 'tokens to write; 0: to end-of-text or maxlen in all', 0)
flags.DEFINE_integer('top_k', 10, 'draw from the k likeliest tokens; 0: from all', 0)
flags.DEFINE_float('temperature', 1.0, '0: always the likeliest token', 0)
flags.DEFINE_string('coordinator', None, 'HOST:PORT of the first of several processes, or auto')
flags.DEFINE_integer('num_processes', None, 'how many processes share the mesh', 1)
flags.DEFINE_integer('process_id', None, 'number of this process, from 0', 0)
FLAGS = flags.FLAGS

# ---- Model: pre-LN transformer, each weight beside its split over the mesh -----------------------
# A primer. The devices form a grid, the mesh, with two named axes. Along `batch` each device has
# other rows of the batch (data parallelism, as in DDP), along `model` another part of the weights
# (tensor parallelism). The code reads as for one device: an array has its full shape in the code
# and is stored in pieces. P('batch', 'model') says how: dimension 0 is split along `batch`,
# dimension 1 along `model`; None: not split. Devices that differ only along an axis that P does not
# name hold the same piece. This sharding is part of the array's type, which JAX checks before
# anything runs. A product that sums over a split dimension leaves a part of the sum on each device:
# out_sharding says how the result is to be split, and the compiler inserts the all-reduce that adds
# the parts up. jax.reshard asks for another split: an all-gather, or a slice. Nothing wraps the
# model as DDP does: a weight's gradient is a product that sums over rows of the batch, so that its
# all-reduce is inserted in the same way.

ROWS = P('batch', None, None)  # of activations (B, T, D): each device has some of the rows
IN_FLOAT32 = {'preferred_element_type': jnp.float32}  # products of bfloat16, added in float32


def weight(rngs: nnx.Rngs, shape, *axes):
    """A parameter drawn from normal(0, 0.02), whose dimension i is split along axes[i]."""
    mesh = jax.sharding.get_abstract_mesh()  # the one that create_mesh has set
    spec = list(axes)
    for i, axis in enumerate(axes):
        if axis and shape[i] % mesh.shape[axis] != 0:
            spec[i] = None  # it does not divide evenly
    # With out_sharding each device draws its own piece: no device ever holds the whole.
    normal = jax.random.normal(rngs.params(), shape, out_sharding=P(*spec))
    return nnx.Param(0.02 * normal)


def project(equation, x, w: nnx.Param, out_sharding):
    """einsum(equation, x, w) in the dtype of x. w is float32; w[...] is the Param's array."""
    return jnp.einsum(equation, x, w[...].astype(x.dtype), out_sharding=out_sharding)


def attention(q_BNTH, k_BNSH, v_BNSH, position=0):
    """Causal attention, (B, N, T, H). Query t stands at position + t, key s at s."""
    T, H = q_BNTH.shape[2:]
    S = k_BNSH.shape[2]
    scores_BNTS = jnp.einsum('bnth,bnsh->bnts', q_BNTH * H**-0.5, k_BNSH, **IN_FLOAT32)
    is_visible_TS = jnp.arange(S) <= position + jnp.arange(T)[:, None]
    scores_BNTS = jnp.where(is_visible_TS, scores_BNTS, -jnp.inf)
    # A softmax that divides last: a step takes 3/4 as long as with jax.nn.dot_product_attention.
    max_BNT1 = lax.stop_gradient(scores_BNTS.max(axis=-1, keepdims=True))  # against overflow
    exp_BNTS = jnp.exp(scores_BNTS - max_BNT1)
    sum_BNT1 = exp_BNTS.sum(axis=-1, keepdims=True)
    heads_BNTH = jnp.einsum('bnts,bnsh->bnth', exp_BNTS.astype(v_BNSH.dtype), v_BNSH, **IN_FLOAT32)
    return (heads_BNTH / sum_BNT1).astype(v_BNSH.dtype)


class TransformerBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Without rngs nothing is dropped."""

    # Megatron's tensor parallelism (arXiv:1909.08053): along `model` the first matrix of a pair is
    # split by columns, the second by rows, so a pair needs one all-reduce. Along `batch` they are
    # split for storage alone: see gather.
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
        """(x_BTD, (keys, values)), the cache (B, N, S, H). Token t of x stands at position + t."""
        drop = functools.partial(self.dropout, deterministic=rngs is None, rngs=rngs)
        heads = P(None, 'batch', 'model', None, None)
        q_BNTH, k_BNSH, v_BNSH = project('btd,dinh->ibnth', self.norm1(x_BTD), self.qkv, heads)
        if cache is not None:
            keys, values = cache
            k_BNSH = lax.dynamic_update_slice_in_dim(keys, k_BNSH, position, axis=2)
            v_BNSH = lax.dynamic_update_slice_in_dim(values, v_BNSH, position, axis=2)
        heads_BNTH = attention(q_BNTH, k_BNSH, v_BNSH, position)
        x_BTD += drop(
            project('bnth,nhd->btd', heads_BNTH, self.out, ROWS)
        )  # all-reduce over `model`
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
        token_BTD = self.token_emb[...].at[ids_BT].get(out_sharding=ROWS)  # token_emb[ids]
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
        # To tie weights make this a property: jit turns a Param with two names into two Params.
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
    # jit runs a function once with tracers in place of arrays, and compiles the operations that it
    # records for these shapes. Inside jit a Module is a tree of arrays: it is taken apart on the
    # way in and built anew on the way out. So an nnx.Rngs that goes through jit or jax.checkpoint
    # is a copy, and each block that gets it draws the same dropout mask.
    return jax.jit(lambda: MiniGPT(config, nnx.Rngs(seed)))()


def gather(model: MiniGPT):
    """The model with its parameters no longer split along `batch`. The forward pass needs this."""

    # All at once and in float32: the memory of ZeRO-2. FSDP would gather block by block.
    def gather_parameter(a):
        spec = jax.typeof(a).sharding.spec  # stored P('batch', 'model') -> used P(None, 'model'):
        spec = [None if axis == 'batch' else axis for axis in spec]  # an all-gather over `batch`
        return jax.reshard(a, P(*spec))

    return jax.tree.map(gather_parameter, model)


# ---- Data: a file of token ids is cut into windows, so that nothing is padded --------------------
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
    """Yields another path to write to. Only when that succeeds does it replace `path`."""
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
        for block in itertools.chain(blocks, [END]):  # the last story may lack its END
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
        problem = f'--tokenizer={name}: {error!r:.200}. Without a network: '
        raise UserError(problem + 'words, bytes, or TIKTOKEN_CACHE_DIR') from error


def load_tokens(text: Path, tokenizer, workdir: Path):
    """(memory-mapped ids of a text: end, story, end, story, end; the digest of the text)."""
    with open(text, 'rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()[:16]
    folder = text.parent if os.access(text.parent, os.W_OK) else workdir
    # The name knows the text and the tokenizer: delete the file if you change file_stories.
    path = folder / f'{text.stem}.{tokenizer.name}.{digest}.tokens'
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
    # A window's last token, which it only predicts, is the first of the next window.
    windows = np.lib.stride_tricks.sliding_window_view(ids, maxlen + 1)[::maxlen]
    return windows[:training], windows[training:]


def training_batches(windows, batch_size, seed):
    """A sequence whose item n is the (B, W) batch of step n: seed and step alone decide it."""
    dataset = grain.MapDataset.source(windows).seed(seed)
    return dataset.shuffle().repeat(2**31).batch(batch_size)  # 2**31: without end


def to_devices(ids_BW):
    """The batch, split along `batch`. A process hands over only the rows that its devices hold."""
    ids_BW = np.asarray(ids_BW, np.int32)
    sharding = NamedSharding(get_mesh(), P('batch', None))
    return jax.make_array_from_callback(ids_BW.shape, sharding, lambda index: ids_BW[index])


# ---- Mesh: (batch, model) devices, simulated where a machine has only CPUs -----------------------
def create_mesh(text='-1,1', num_processes=1):
    """Makes the mesh that --mesh describes and sets it as the current one, which the rest uses."""
    is_valid = re.fullmatch(r'(-1|[1-9]\d*),(-1|[1-9]\d*)', text) and text != '-1,-1'
    require(is_valid, f'--mesh={text} is not batch,model, such as 4,2, or -1,2 for all devices.')
    batch, model = map(int, text.split(','))
    # CPUs can stand for as many devices as are asked for, if JAX is told before its first use.
    simulated = min(max(batch, 1) * max(model, 1) // num_processes, 256)
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
    jax.set_mesh(mesh)  # Explicit: shardings are part of types, as the primer says
    return mesh


def check_sizes(config: ModelConfig, mesh: Mesh, batch_size, accum_steps=1):
    """Raises a UserError if a size is not divisible by the number of its parts."""
    batch, model = mesh.devices.shape
    require(128 % model == 0, f'--mesh={batch},{model}: model must be a power of 2 up to 128.')
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
    # In shard_map, as with torch.distributed, a function sees the pieces of one device and adds up
    # over devices itself: psum and pmax are all-reduces.
    local = functools.partial(local_token_losses, vocab_size=vocab_size)
    in_specs = ROWS, P('model', None), P('batch', None)
    out_specs = P('batch', None), ROWS, P('model', None)
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs)(x_BTD, w_VD, y_BT)


def local_token_losses(x_BTD, w_VD, y_BT, vocab_size):
    """token_losses on one device, with its rows of x and y and its V rows of w."""
    V, D = w_VD.shape
    w_VD = w_VD.astype(x_BTD.dtype)
    first_id = lax.axis_index('model') * V
    is_real_V = first_id + jnp.arange(V) < vocab_size  # the others pad the vocabulary
    is_here_BT = (y_BT >= first_id) & (y_BT < first_id + V)
    local_id_BT = jnp.where(is_here_BT, y_BT - first_id, V)  # V, out of bounds: another device's

    def add_chunk(dw_VD, chunk):
        x_CD, local_id_C = chunk
        logits_CV = jnp.matmul(x_CD, w_VD.T, **IN_FLOAT32)
        logits_CV = jnp.where(is_real_V, logits_CV, -jnp.inf)
        max_C = lax.pmax(logits_CV.max(axis=-1), 'model')  # over the whole vocabulary
        exp_CV = jnp.exp(logits_CV - max_C[:, None])
        target_CD = w_VD.at[local_id_C].get(mode='fill', fill_value=0)  # w[y]
        target_C = jnp.einsum('cd,cd->c', x_CD, target_CD, **IN_FLOAT32)
        sum_C, target_C = lax.psum((exp_CV.sum(axis=-1), target_C), 'model')
        loss_C = max_C + jnp.log(sum_C) - target_C
        # With softmax = exp / sum no array of dlogits is built. The onehot's part of dw comes last.
        exp_CV = exp_CV.astype(x_CD.dtype)
        dx_CD = lax.psum((exp_CV @ w_VD) / sum_C[:, None] - target_CD, 'model')
        scaled_x_CD = (x_CD / sum_C[:, None]).astype(x_CD.dtype)
        dw_VD += jnp.matmul(exp_CV.T, scaled_x_CD, **IN_FLOAT32)
        return dw_VD, (loss_C, dx_CD.astype(x_CD.dtype))

    size = largest_divisor(y_BT.size, CHUNK)
    chunks = x_BTD.reshape(-1, size, D), local_id_BT.reshape(-1, size)
    # "varying" tells the type checker of shard_map that each device has a dw of its own.
    zeros_VD = lax.pcast(jnp.zeros(w_VD.shape), ('batch', 'model'), to='varying')
    # scan is a compiled loop of add_chunk(carry, chunk) -> (carry, output).
    dw_VD, (losses, dx) = lax.scan(add_chunk, zeros_VD, chunks)
    dw_VD = dw_VD.at[local_id_BT].add(-x_BTD.astype(jnp.float32), mode='drop')
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
    """A function of the step: the rate rises to its peak, then falls to a tenth of it."""
    warmup = min(warmup_steps, steps - 1)
    return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, steps, peak / 10)


def create_optimizer(model, learning_rate, weight_decay=0.1, clip_norm=1.0):
    """AdamW after clipping by the global norm. learning_rate is a number or a schedule."""
    is_matrix = functools.partial(jax.tree.map, lambda a: a.ndim > 1)
    # AdamW treats each number by itself, so that its state is split as the parameters are. An
    # optimizer that multiplies matrices, such as Muon, has to run inside jax.sharding.auto_axes.
    adamw = optax.adamw(learning_rate, b2=0.95, weight_decay=weight_decay, mask=is_matrix)
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    clipped_adamw = optax.chain(clip, adamw)
    return jax.jit(lambda model: nnx.Optimizer(model, clipped_adamw, wrt=nnx.Param))(model)


# A Module is a tree of arrays: jax.tree.map calls a function on each, and the gradient of a MiniGPT
# is a MiniGPT. A key always draws the same numbers: fold_in and split make new keys of it. Donated
# arguments give their memory to the results, so that after the call the old arrays are gone.
@jax.jit(donate_argnums=(0, 1), static_argnames='accum_steps')
def train_step(model, optimizer, ids_BW, key, accum_steps=1):
    """One update: (model, optimizer, {'loss', 'grad_norm'}), the loss in nats a token."""
    key = jax.random.fold_in(key, optimizer.step[...])  # so that a resumed run drops the same
    gathered = gather(model)

    def add_as_stored(total, part):  # the other half of gather: split as the parameters are stored
        return total + jax.reshard(part, jax.typeof(total).sharding.spec)

    def add_micro_batch(sums, micro_batch):
        loss_and_grads = jax.value_and_grad(loss_fn)(gathered, *micro_batch)
        return jax.tree.map(add_as_stored, sums, loss_and_grads), None

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
    losses_BT, _, _ = token_losses(x_BTD, w_VD, y_BT, model.config.vocab_size)
    # jit drops the gradients, which nothing uses. P() copies: each process can read every loss.
    return jax.reshard(losses_BT.mean(axis=-1), P())


# ---- Reports: log lines, metrics.csv, loss.png and the profile -----------------------------------
COLUMNS = ('step', 'loss', 'grad_norm', 'learning_rate', 'tokens_per_s', 'val_loss')
PEAKS = {  # bfloat16 TFLOP/s of a device, by its maker: model FLOPs utilisation is a share of it
    'NVIDIA H100 80GB HBM3': 989,
    'NVIDIA H200': 989,
    'TPU v4': 275,
    'TPU v5 lite': 197,
    'TPU v5': 459,
    'TPU v6 lite': 918,
}


def say(text, file=None):
    """Prints, in process 0 only."""
    if jax.process_index() == 0:
        with contextlib.suppress(BrokenPipeError):  # Ctrl-C has ended `| tee`
            print(text, file=file, flush=True)


class Log:
    """Lines on stdout, rows of metrics.csv, and loss.png. Step n is the state after n updates."""

    def __init__(self, workdir: Path, start, total, tokens, entropy=None):
        self.workdir, self.total = workdir, total
        self.tokens = tokens  # in a step
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
        self.log, self.config, self.num_steps = log, config, num_steps
        self.start = log.clock_step
        self.first = self.start + 5
        self.last = self.first + num_steps - 1
        problem = f'--profile_steps={num_steps} needs --max_steps={self.last + 1} or more'
        require(num_steps == 0 or self.last < log.total, f'{problem}: it is {log.total}.')
        self.folder = log.workdir / f'profile/{jax.process_index()}'

    @contextlib.contextmanager
    def step(self, step):
        """The context in which a training step runs."""
        is_traced = self.first <= step <= self.last
        if is_traced and step == self.first:
            jax.block_until_ready(jax.live_arrays())  # until the steps before have ended
            jax.profiler.start_trace(self.folder)
            self.clock = time.perf_counter()
            self.log.restart_clock(step)
        with jax.profiler.StepTraceAnnotation('train', step_num=step):
            yield
        if step == self.start:  # the first call has compiled the step: no part of the speed
            self.log.restart_clock(step)
        if is_traced and step == self.last:
            jax.block_until_ready(jax.live_arrays())
            seconds = time.perf_counter() - self.clock
            jax.profiler.stop_trace()
            self.report(seconds)
            self.log.clock += time.perf_counter() - self.clock - seconds  # nor is this pause

    def report(self, seconds):
        """Prints the speed, and the shares of the time: of the devices, and of the host's input."""
        # Operations of a compiled program have an hlo_op. While, call and cond contain others.
        events, input_ns = [], 0
        path = max(self.folder.rglob('*.xplane.pb'), key=os.path.getmtime)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for event in itertools.chain.from_iterable(line.events for line in plane.lines):
                stats = dict(event.stats)
                operation = stats.get('hlo_op', '')
                if event.name == 'input':  # see train
                    input_ns += event.duration_ns
                elif operation and not re.match('while|call|cond', operation):
                    device = plane.name, stats.get('device_ordinal', 0)
                    events.append((device, event.start_ns, event.end_ns, operation))
        spent, ends = collections.Counter(), collections.Counter()
        for device, start, end, operation in sorted(events):
            is_collective = bool(re.match('all-|reduce-scatter|collective-', operation))
            spent[is_collective] += max(0, end - max(start, ends[device]))  # an overlap counts once
            ends[device] = max(end, ends[device])
        steps, tokens, devices = self.num_steps, self.log.tokens, get_mesh().devices
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


# ---- Sampler: one pass over the prompt fills the KV cache, then each token takes a pass ----------
@jax.jit(static_argnames='top_k')
def generate_tokens(model, ids_BT, start, stop, end, key, temperature, top_k):
    """ids_BT filled from start to stop, or until each row has the id `end` after its first id."""
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
        logits_BV = jax.reshard(logits_BV, P())[:, :vocab_size]  # without the padding
        top_BK, id_BK = lax.top_k(logits_BV, min(top_k or vocab_size, vocab_size))
        scale = jnp.maximum(temperature, 1e-9)  # 0 must not divide; 1e-9 is as sure
        choice_B = jax.random.categorical(jax.random.fold_in(key, position), top_BK / scale)
        token_B1 = jnp.take_along_axis(id_BK, choice_B[:, None], axis=1)
        token_B1 = jax.reshard(token_B1, P('batch', None))
        ids_BT = lax.dynamic_update_slice_in_dim(ids_BT, token_B1, position, axis=1)
        return position + 1, ids_BT, caches

    # One pass over whole rows. What the cache gets after the prompt is replaced before it is used.
    _, caches = model(ids_BT)
    _, ids_BT, _ = lax.while_loop(is_unfinished, write_token, (start, ids_BT, caches))
    return jax.reshard(ids_BT, P())


def encode_prompt(tokenizer, prompt, maxlen):
    """The ids of end-of-text, after which every story of the data begins, and of the prompt."""
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)]
    require(len(ids) < maxlen, f'--prompt of {len(ids)} tokens is too long for maxlen={maxlen}.')
    return ids


def generate_text(
    model, tokenizer, prompt, num_samples=1, max_new_tokens=0, top_k=10, temperature=1.0, seed=42
):
    """A list of texts that begin with the prompt. The flags of these names explain the rest."""
    maxlen = model.config.maxlen
    prompt_ids = encode_prompt(tokenizer, prompt, maxlen)
    start = len(prompt_ids)
    stop = min(maxlen, start + (max_new_tokens or maxlen))
    batch = get_mesh().shape['batch']
    ids_BT = np.zeros((math.ceil(num_samples / batch) * batch, maxlen))
    ids_BT[:, :start] = prompt_ids
    ids_BT, end = to_devices(ids_BT), tokenizer.eot_token
    key = jax.random.key(seed)
    ids_BT = generate_tokens(model, ids_BT, start, stop, end, key, temperature, top_k)
    known = set(map(tokenizer.encode_single_token, tokenizer.token_byte_values()))
    texts = []
    for row in np.asarray(ids_BT)[:num_samples, 1:stop].tolist():
        ids = itertools.takewhile(lambda i: i in known, row)  # end-of-text is not
        text = tokenizer.decode(list(ids))
        texts.append(text.rstrip('\ufffd'))  # without half a character at the end
    return texts


# ---- Checkpoint: model, optimizer and settings; seed and step decide data order and keys ---------
def open_checkpoints(workdir: Path, keep=1, read_only=False):
    """An Orbax manager that keeps the newest checkpoints, and removes a half-written one."""
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
        nnx.update(module, restored[name])  # split as the module's arrays are
    return step, restored['settings']


# ---- Main: set-up, the training loop, and --mode=sample ------------------------------------------
MODEL = [field.name for field in dataclasses.fields(ModelConfig) if field.name != 'vocab_size']
FIXED = [*MODEL, 'tokenizer', 'batch_size', 'seed']  # what a resumed run must not change
SAMPLING = ['prompt', 'num_samples', 'max_new_tokens', 'top_k', 'temperature', 'seed']
SIGNALS = []  # received so far: the loop saves and stops


def on_signal(number, frame):
    """Asks the loop to save and stop. The same signal again ends the process at once."""
    SIGNALS.append(number)
    signal.signal(number, signal.SIG_DFL)
    os.write(2, b'stopping after this step; a second time stops at once, unsaved\n')


def flag_values(names):
    return {name: FLAGS[name].value for name in names}


class Run:
    """What the flags describe: the text as token ids, the sizes and the settings, all checked."""

    def __init__(self):
        mesh = create_mesh(FLAGS.mesh, FLAGS.num_processes or 1)
        n_batch, n_model = mesh.devices.shape
        # Which text is it? set_default leaves alone what the command line has set.
        text = Path(FLAGS.data).expanduser()
        is_grammar = FLAGS.data == 'grammar' or not (FLAGS['data'].present or text.exists())
        if is_grammar:
            for name, value in GRAMMAR_DEFAULTS.items():
                FLAGS.set_default(name, value)
        FLAGS.set_default('batch_size', math.ceil(FLAGS.batch_size / n_batch) * n_batch)
        B, T = FLAGS.batch_size, FLAGS.maxlen
        name = 'grammar' if is_grammar else text.resolve(strict=True).stem
        sizes = f'{FLAGS.num_transformer_blocks}x{FLAGS.embed_dim}-b{B}-s{FLAGS.seed}'
        self.workdir = Path(FLAGS.workdir or f'runs/{name}-{sizes}').expanduser()
        (self.workdir / 'checkpoints').mkdir(parents=True, exist_ok=True)
        kind = mesh.devices.flat[0].device_kind
        say(f'{name} -> {self.workdir} | mesh {n_batch},{n_model} of {kind}')
        if is_grammar:
            text = self.workdir / 'grammar.txt'
            write_grammar(text)
        # The tokenizer and the model's sizes, checked before the text is tokenised.
        words = common_words(file_stories(text)) if FLAGS.tokenizer == 'words' else []
        self.tokenizer = load_tokenizer(FLAGS.tokenizer, words)
        encode_prompt(self.tokenizer, FLAGS.prompt, T)  # raises now if it is too long
        self.config = ModelConfig(self.tokenizer.n_vocab, **flag_values(MODEL))
        check_sizes(self.config, mesh, B, FLAGS.accum_steps or 1)
        FLAGS.set_default('accum_steps', choose_accum_steps(mesh, B, T))
        # Windows and steps.
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
        _, saved = restore(checkpoints)  # the settings alone, which must not have changed
        saved = saved or self.settings
        for name, value in self.settings.items():
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
        """(mean loss on the held-out windows, nats a token; a story)."""
        rows = FLAGS.batch_size // FLAGS.accum_steps
        n = len(self.held_out)
        # np.resize fills the last batch up with the first windows. np.asarray waits for each
        # program: on simulated devices two at once could wait for each other for ever.
        batches = np.resize(self.held_out, (math.ceil(n / rows), rows, FLAGS.maxlen + 1))
        losses = [np.asarray(eval_step(model, to_devices(batch))) for batch in batches]
        sampling = flag_values(SAMPLING) | {'num_samples': 1}
        [story] = generate_text(model, self.tokenizer, **sampling)
        return np.concatenate(losses)[:n].mean(), story


def train():
    """--mode=train: starts a run, or goes on with it, until its last step or a signal."""
    run = Run()
    checkpoints = open_checkpoints(run.workdir, FLAGS.keep)
    step, model, optimizer, schedule = run.start_or_resume(checkpoints)
    batches = training_batches(run.training, FLAGS.batch_size, FLAGS.seed)
    key = jax.random.key(FLAGS.seed)
    total, accum, metrics, stop = FLAGS.max_steps, FLAGS.accum_steps, None, False
    log = Log(run.workdir, step, total, FLAGS.batch_size * FLAGS.maxlen, run.entropy)
    profiler = Profiler(log, run.config, FLAGS.profile_steps)

    def due(every):
        return step == total or (every > 0 and step % every == 0)

    if jax.process_count() == 1:  # else JAX itself listens to SIGTERM, for all processes
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
    if step == 0:
        log.validation(0, *run.evaluate(model))
    with checkpoints:  # whatever ends the loop, a save that is under way is finished
        while step < total and not stop:
            with profiler.step(step):
                with jax.profiler.TraceAnnotation('input'):
                    ids_BW = to_devices(batches[step])
                before = metrics  # train_step returns at once: at most two steps are under way
                model, optimizer, metrics = train_step(model, optimizer, ids_BW, key, accum)
                jax.block_until_ready(before)
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
    """Does what --mode says. What the user can fix ends in one line and exit status 1."""
    if len(argv) > 1:
        raise app.UsageError(f'Stray argument {argv[1]}: flags begin with --, as in --mesh=4,2.')
    logging.set_verbosity(logging.FATAL)  # Orbax logs what it also raises
    try:
        if FLAGS.coordinator:
            address = None if FLAGS.coordinator == 'auto' else FLAGS.coordinator  # None: Slurm's
            jax.distributed.initialize(address, FLAGS.num_processes, FLAGS.process_id)
        require(
            FLAGS.coordinator or not FLAGS.num_processes, '--num_processes needs --coordinator.'
        )
        train() if FLAGS.mode == 'train' else sample()
    except UnicodeDecodeError as error:
        sys.exit(f'--data={FLAGS.data} is not UTF-8 text ({error.reason}). Use gunzip or iconv?')
    except (UserError, OSError, jax.errors.JaxRuntimeError) as error:  # the last: out of memory
        sys.exit(str(error).splitlines()[0])


if __name__ == '__main__':
    app.run(main)
