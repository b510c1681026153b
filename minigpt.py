"""minigpt: train, sample, resume and profile a GPT in JAX and Flax NNX, on one device or many.

    python minigpt.py                                   # learns a small story language in minutes
    python minigpt.py --mesh=4,2 --batch_size=144       # TinyStories-train.txt, on 8 devices
    python minigpt.py --mode=sample --prompt='One day'  # writes with the newest run

The mesh has two axes: `batch` splits the rows of a batch (data parallel), `model` splits attention
heads, MLP and output layer (tensor parallel); --mesh alone chooses.
    Flags        each default, but for those that the text decides (resolve_flags)
    Model        TransformerBlock, TokenAndPositionEmbedding, MiniGPT, create_model
    Data         text -> file of token ids -> windows -> shuffled batches
    Mesh         --mesh checked, simulated on CPUs, built
    Train step   loss fused with the output layer, AdamW, gradient accumulation
    Reports      log lines, metrics.csv, loss.png, profile
    Sampler      top-k sampling with a KV cache, in one compiled loop
    Checkpoint   saved in the background, restored onto any mesh
    Main         checks, set-up, validation and the training loop
Capitals in names are shapes: B batch, T time (tokens), S T+1 or cached tokens, D embed_dim, V
vocabulary, F feed_forward_dim, N heads, H head size, A micro-batches, C chunk of tokens, K top_k.
It has no mixture of experts, no reinforcement learning and no server.
"""
import collections, contextlib, datetime, fcntl, glob, hashlib, itertools, math, os
import pathlib, random, re, signal, sys, tempfile, time, timeit
import grain, jax, matplotlib.figure, optax, tiktoken
import jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
from absl import app, flags, logging
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

# ---- Flags: each default stands here; only the functions of the section Main read them -----------
flags.DEFINE_enum('mode', 'train', ['train', 'sample'], 'train or resume a run, or write with it')
flags.DEFINE_string('workdir', None, 'folder of the run; unset: runs/NAME, or to sample the newest')
flags.DEFINE_bool('overwrite', False, 'delete the run in the workdir and start anew')
flags.DEFINE_integer('keep', 3, 'newest checkpoints kept, beside the best by validation loss', 1)
flags.DEFINE_string('mesh', '-1,1', 'devices as batch,model; -1: all; CPUs simulate them, -1 is 1')
flags.DEFINE_integer('num_transformer_blocks', 8, 'blocks', 1, 1000)
flags.DEFINE_integer('maxlen', None, 'tokens of context; unset: 256, for the grammar 64', 2, 2**20)
flags.DEFINE_integer('embed_dim', 256, 'width of embeddings and blocks', 1, 2**16)
flags.DEFINE_integer('num_heads', 8, 'attention heads a block', 1, 2**16)
flags.DEFINE_integer('feed_forward_dim', 256, 'width inside the MLP', 1, 2**20)
flags.DEFINE_float('dropout', 0.0, 'share dropped in training; the tutorial: 0.1', 0, 0.9)
flags.DEFINE_enum('dtype', 'auto', ['auto', 'float32', 'bfloat16'], 'auto: float32 on CPUs')
flags.DEFINE_string('data', None, 'UTF-8 text, or grammar; unset: TinyStories-train.txt if here')
flags.DEFINE_string('tokenizer', None, "bytes, words or tiktoken's; unset: gpt2 (grammar: words)")
flags.DEFINE_integer('batch_size', None, 'windows a step; unset: 144, grammar: 4', 1, 2**20)
flags.DEFINE_integer('accum_steps', 0, 'micro-batches a step; 0: by batch, maxlen and mesh', 0)
flags.DEFINE_integer('num_epochs', 1, 'times each window is seen', 1, 10**4)
flags.DEFINE_integer('max_steps', 0, 'steps in all; 0: what num_epochs gives', 0, 2**31 - 1)
flags.DEFINE_float('learning_rate', 1e-3, 'peak, after warm-up and before the cosine', 0, 1e38)
flags.DEFINE_integer('warmup_steps', 20, 'steps of rising learning rate', 0)
flags.DEFINE_float('weight_decay', 0.1, 'of AdamW, on matrices', 0, 1e38)
flags.DEFINE_float('clip_norm', 1.0, 'largest gradient norm', 0, 1e38)
flags.DEFINE_integer('seed', 42, 'of parameters, order, dropout and samples', 0, 2**32 - 1)
flags.DEFINE_integer('log_every', 10, 'steps between log lines', 1)
flags.DEFINE_integer('eval_every', 200, 'steps between validations, stories; 0: only at the end', 0)
flags.DEFINE_integer('checkpoint_every', 200, 'steps between checkpoints; 0: only at the end', 0)
flags.DEFINE_integer('profile_steps', 0, 'steps to trace, after 5 steps of warm-up', 0)
flags.DEFINE_string('prompt', 'Once upon a time', 'beginning of the text')
flags.DEFINE_integer('num_samples', 1, 'texts to write', 1, 10000)
flags.DEFINE_integer('max_new_tokens', 0, 'tokens to write; 0: to end-of-text or maxlen in all', 0)
flags.DEFINE_integer('top_k', 10, 'draw from the k likeliest tokens; 0: from all', 0)
flags.DEFINE_float('temperature', 1.0, '0: always the likeliest token', 0, 1e38)
flags.DEFINE_string('coordinator', None, 'of several processes: HOST:PORT of the first, or auto')
flags.DEFINE_integer('num_processes', None, 'processes in all, each with its part of the mesh', 1)
flags.DEFINE_integer('process_id', None, 'number of this process, from 0', 0)
values = lambda F, names: {name: F[name].value for name in names}
SAMPLING = 'prompt', 'max_new_tokens', 'top_k', 'temperature', 'seed'
SIZES = 'num_transformer_blocks maxlen embed_dim num_heads feed_forward_dim dropout'.split()
FIXED = 'tokenizer', 'batch_size', 'seed', *SIZES   # what a resume must not change; what it may:
FREE = 'mesh dtype accum_steps max_steps learning_rate warmup_steps weight_decay clip_norm'.split()
def require(condition, problem):
    """Ends the script with one line and exit status 1 unless the condition holds."""
    if not condition:
        sys.exit(problem)

# ---- Model: pre-LN; weights split over `model` by column, then row, over `batch` to store (FSDP) -
FLOAT32 = dict(preferred_element_type=jnp.float32)   # attention and logits add up in it
def weight(rngs, shape, *axes):
    """A parameter drawn from normal(0, 0.02), split over mesh axes where they divide it evenly."""
    mesh = jax.sharding.get_abstract_mesh().shape
    axes = tuple(axis if axis and n % mesh[axis] == 0 else None for n, axis in zip(shape, axes))
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape), out_sharding=axes)
def project(equation, x, w, *axes):
    """einsum, with an all-reduce if it sums over `model`. axes: split of dimensions 2, 3..."""
    return jnp.einsum(equation, x, w[...].astype(x.dtype), out_sharding=P('batch', None, *axes))
def attention(q_BNTH, k_BNSH, v_BNSH, index=0):
    """Causal attention, (B, N, T, H), of queries at positions index... to keys at positions 0..."""
    scores_BNTS = jnp.einsum('bnth,bnsh->bnts', q_BNTH * q_BNTH.shape[-1]**-0.5, k_BNSH, **FLOAT32)
    visible_TS = jnp.arange(k_BNSH.shape[2]) <= index + jnp.arange(q_BNTH.shape[2])[:, None]
    scores_BNTS = jnp.where(visible_TS, scores_BNTS, -jnp.inf)
    # Divided by the sum at the end: a step takes 3/4 as long as with jax.nn's attention.
    exp_BNTS = jnp.exp(scores_BNTS - jax.lax.stop_gradient(scores_BNTS.max(-1, keepdims=True)))
    out_BNTH = jnp.einsum('bnts,bnsh->bnth', exp_BNTS.astype(v_BNSH.dtype), v_BNSH, **FLOAT32)
    return (out_BNTH / exp_BNTS.sum(-1, keepdims=True)).astype(v_BNSH.dtype)

class TransformerBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout acts where rngs are given."""
    def __init__(self, embed_dim, num_heads, feed_forward_dim, dropout, dtype, rngs):
        D, N, H, F = embed_dim, num_heads, embed_dim // num_heads, feed_forward_dim
        self.norm1 = nnx.LayerNorm(D, dtype=dtype, rngs=rngs)
        self.qkv = weight(rngs, (D, 3, N, H), 'batch', None, 'model')
        self.out = weight(rngs, (N, H, D), 'model', None, 'batch')
        self.norm2 = nnx.LayerNorm(D, dtype=dtype, rngs=rngs)
        self.up = weight(rngs, (D, F), 'batch', 'model')
        self.down = weight(rngs, (F, D), 'model', 'batch')
        self.dropout = nnx.Dropout(dropout)
    def __call__(self, x_BTD, cache=None, index=0, rngs=None):
        """x_BTD and (keys, values), each (B, N, S, H); with a cache of these x begins at index."""
        drop = lambda x: self.dropout(x, deterministic=rngs is None, rngs=rngs)
        qkv = project('btd,dinh->btinh', self.norm1(x_BTD), self.qkv, None, 'model')
        q_BNTH, k_BNSH, v_BNSH = jnp.unstack(qkv.swapaxes(1, 3), axis=2)
        if cache is not None:
            k_BNSH, v_BNSH = (jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=2)
                              for old, new in zip(cache, (k_BNSH, v_BNSH)))
        out_BNTH = attention(q_BNTH, k_BNSH, v_BNSH, index)
        x_BTD += drop(project('bnth,nhd->btd', out_BNTH, self.out))
        up_BTF = nnx.relu(project('btd,df->btf', self.norm2(x_BTD), self.up, 'model'))
        return x_BTD + drop(project('btf,fd->btd', up_BTF, self.down)), (k_BNSH, v_BNSH)

class TokenAndPositionEmbedding(nnx.Module):
    """The sum of a learned vector for each token and one for each position."""
    def __init__(self, maxlen, vocab_size, embed_dim, dtype, rngs):
        self.token_emb = weight(rngs, (vocab_size, embed_dim), 'batch', 'model')
        self.pos_emb = weight(rngs, (maxlen, embed_dim), None, 'batch')
        self.maxlen, self.dtype = maxlen, dtype
    def __call__(self, ids_BT, index=0):
        token_BTD = self.token_emb[...].at[ids_BT].get(out_sharding=P('batch', None, None))
        pos_TD = jax.lax.dynamic_slice_in_dim(self.pos_emb[...], index, ids_BT.shape[1])
        return (token_BTD + pos_TD).astype(self.dtype)

class MiniGPT(nnx.Module):
    """Everything up to the output layer, which loss and sampler apply in their own ways."""
    def __init__(self, vocab_size, maxlen, embed_dim, num_transformer_blocks, dtype, rngs, **block):
        rows = -(-vocab_size // 128) * 128   # GPT-2's 50257 is odd: no `model` axis could split it
        self.vocab_size = vocab_size
        self.embedding_layer = TokenAndPositionEmbedding(maxlen, rows, embed_dim, dtype, rngs)
        self.transformer_blocks = nnx.List(TransformerBlock(
            embed_dim, dtype=dtype, rngs=rngs, **block) for _ in range(num_transformer_blocks))
        self.norm = nnx.LayerNorm(embed_dim, dtype=dtype, rngs=rngs)
        self.output_layer = weight(rngs, (rows, embed_dim), 'model', 'batch')
    def __call__(self, ids_BT, caches=None, index=0, rngs=None):
        """Returns x_BTD, to be multiplied by output_layer (V, D), and the blocks' caches."""
        x_BTD, new_caches = self.embedding_layer(ids_BT, index), []
        for block, cache in zip(self.transformer_blocks, caches or itertools.repeat(None)):
            x_BTD, cache = block(x_BTD, cache, index, rngs)
            new_caches.append(cache)
        return self.norm(x_BTD), new_caches

def create_model(seed, vocab_size, dtype, **settings):
    """MiniGPT of --dtype; each parameter is made sharded, never whole."""
    auto = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
    dtype = jnp.dtype(auto if dtype == 'auto' else dtype)
    return jax.jit(lambda: MiniGPT(vocab_size, dtype=dtype, rngs=nnx.Rngs(seed), **settings))()
def gather(model):
    """The model with each parameter whole over `batch`, as the forward pass needs it (FSDP)."""
    spec = lambda a: P(*(None if n == 'batch' else n for n in jax.typeof(a).sharding.spec))
    return jax.tree.map(lambda a: jax.reshard(a, spec(a)), model)

# ---- Data: one stream of token ids in a memory-mapped file, cut into windows; nothing is padded --
END = '<|endoftext|>'
WORDS = r' ?[^\W\d_]+| ?[^\s\w]|\s|\d|_'   # a word with the space before it, or one character
BLOCK = 1 << 16                            # characters at a time; longer stories go in pieces
STORY = ('Once upon a time there was a {mood} {animal} named {name}. {name} lived in the {place} '
         'and loved to {play}. One day {name} found a {color} {thing} near the {place}. Then a '
         '{feeling} {friend} came by. {name} gave the {color} {thing} to the {friend}. The '
         '{friend} was not {feeling} any more and they {deed} until the night.')
CHOICES = dict(
    mood='shy bold glad kind wise calm lazy tiny', animal='dog cat fox hen bear duck frog mouse',
    name='Max Lily Tom Mia Sam Zoe Ben Anna', place='park town farm zoo yard barn wood cave',
    play='run jump swim climb dance sing dig hide', color='red blue green gray pink tan black gold',
    thing='ball key cake hat cup pen coin bell', feeling='sad lost tired cold weak sick hurt mad',
    friend='bird wolf pony goat pig crab bee owl', deed='sang hid talked danced ran sat ate played')
ENTROPY = sum(math.log(len(words.split())) for words in CHOICES.values()) / 64   # nats a token
def grammar_stories():
    """Yields 2,112 stories of 64 tokens, always the same: 2,048 to train on and 64 held out."""
    rng = random.Random(0)
    for _ in range(2112):
        words = {slot: rng.choice(choices.split()) for slot, choices in CHOICES.items()}
        yield STORY.format(**words) + END
def file_stories(path):
    """Yields the stories of a text, stripped, END after each; those longer than BLOCK in pieces."""
    rest = ''
    with open(path, encoding='utf-8-sig') as file:   # any line ending, and a byte-order mark
        try:
            for block in itertools.chain(iter(lambda: file.read(BLOCK), ''), [END]):
                require('\0' not in block, f'{path} is not UTF-8 text: it holds NUL characters.')
                *stories, rest = (rest + block).split(END)
                yield from (story.strip().lstrip('\0') + END for story in stories if story.strip())
                while len(rest) > BLOCK + len(END):   # so that no END is cut in two
                    yield rest[:BLOCK].lstrip('\0')
                    rest = '\0' + rest[BLOCK:]   # strip is to leave alone what follows a cut
        except UnicodeDecodeError as error:
            at = file.buffer.tell() - len(error.object) + error.start
            sys.exit(f'{path} is not UTF-8 text: {error.reason} at byte {at}. Use gunzip or iconv?')
stories_of = lambda data: file_stories(data) if data else grammar_stories()
def common_words(stories):
    """The 4,096 most frequent words of the first 10,000 stories."""
    lists = (re.findall(WORDS, text.removesuffix(END)) for text in itertools.islice(stories, 10000))
    counts = collections.Counter(w for w in itertools.chain.from_iterable(lists) if len(w) > 1)
    return [word for word, _ in counts.most_common(4096)]
def load_tokenizer(name, words=()):
    """tiktoken.Encoding: one of its own by name, or 256 bytes and `words` as tokens."""
    if name in ('bytes', 'words'):
        tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
        return tiktoken.Encoding(name, pat_str=WORDS, special_tokens={END: len(tokens)},
                                 mergeable_ranks={token: i for i, token in enumerate(tokens)})
    known = tiktoken.list_encoding_names()
    require(name in known, f'--tokenizer={name} is not one of bytes, words, {", ".join(known)}.')
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        url = str(getattr(getattr(error, 'request', None), 'url', error))
        sys.exit(f'--tokenizer={name} needs a network, or TIKTOKEN_CACHE_DIR set to a folder with '
                 f'{url} in it, named {hashlib.sha1(url.encode()).hexdigest()}. words needs none.')
@contextlib.contextmanager
def replacing(path):
    """Gives a path to write to, which then takes the place of `path`: whole or not at all."""
    with tempfile.TemporaryDirectory(prefix='.part-', dir=path.parent) as folder:
        yield pathlib.Path(folder, path.name)
        os.replace(pathlib.Path(folder, path.name), path)
def write_tokens(path, stories, tokenizer, dtype):
    """Writes END and the stories as ids, in bounded memory; a signal ends it."""
    pieces, stories = [END], iter(stories)
    with replacing(path) as part, open(part, 'wb') as file:
        while pieces:
            lists = tokenizer.encode_batch(pieces, allowed_special={END}, disallowed_special=())
            file.write(np.fromiter(itertools.chain.from_iterable(lists), dtype))
            pieces = list(itertools.islice(stories, 512))
            say(f'{path}: {file.tell() // dtype().itemsize:,} tokens', '\r' if pieces else '\n')
            if SIGNALS:   # see on_signal
                sys.exit(128 + SIGNALS[0])
def load_tokens(data, tokenizer, workdir):
    """(ids, digest) of the text (None: the grammar), memory-mapped; tokenises it only once."""
    text = [data.stat().st_size, data.stat().st_mtime_ns] if data else [STORY, CHOICES]
    source = hashlib.sha256(repr([text, tokenizer.token_byte_values()]).encode()).hexdigest()[:8]
    folder = data.parent if data and os.access(data.parent, os.W_OK) else workdir
    path = folder / f'{data.name if data else "grammar"}.{tokenizer.name}.{source}.tokens'
    dtype = np.uint16 if tokenizer.n_vocab <= 1 << 16 else np.uint32
    if jax.process_index() == 0 and not path.exists():
        write_tokens(path, stories_of(data), tokenizer, dtype)
    while not path.exists():   # process 0 writes it
        time.sleep(1)
    ids = np.memmap(path, dtype, 'r')
    return ids, hashlib.sha256(ids).hexdigest()[:16]
def split_windows(ids, maxlen, batch_size):
    """(training, held-out) windows of ids, (n, S) views: held out is the last tenth, at most 64."""
    n = (ids.size - 1) // maxlen
    training = n - min(64, -(-n // 10))
    require(training >= batch_size, f'{ids.size} tokens give {training} windows of {maxlen} to '
            f'train on, fewer than --batch_size={batch_size}: lower it or --maxlen, or add text.')
    windows = np.lib.stride_tricks.sliding_window_view(ids, maxlen + 1)[::maxlen]
    return windows[:training], windows[training:]
def training_batches(windows, batch_size, seed):
    """Sequence whose item n is the (B, S) batch of step n: seed and step alone decide it."""
    shuffled = grain.MapDataset.source(windows).seed(seed).shuffle().repeat(2**31)   # > max_steps
    return shuffled.batch(batch_size)   # 3 ms for 144 windows: no threads are needed
def to_devices(ids_BS):
    """The batch split over `batch`; each process hands over only the rows that its devices hold."""
    sharding = NamedSharding(jax.sharding.get_mesh(), P('batch', None))
    return jax.make_array_from_callback(ids_BS.shape, sharding, ids_BS.astype(np.int32).__getitem__)

# ---- Mesh: (batch, model) devices, simulated where a machine has only CPUs ----------------------
def mesh_shape(text, devices, simulated):
    """(batch, model) of --mesh; exits unless it fits the devices and uses all accelerators."""
    require(re.fullmatch(r'(-1|[1-9]\d*),(-1|[1-9]\d*)', text) and text != '-1,-1',
            f'--mesh={text} is not batch,model, such as 4,2, or -1,2 for all devices.')
    batch, model = map(int, text.split(','))
    known = max(batch, 1) * max(model, 1)
    batch, model = (max(1, devices // known) if n == -1 else n for n in (batch, model))
    if batch * model > devices or (batch * model < devices and not simulated):
        model = math.gcd(model, devices)
        sys.exit(f'--mesh={text} needs {known} devices, this machine has {devices}: '
                 f'use {devices // model},{model} or -1,{model}.')
    return batch, model
def create_mesh(text, processes=1):
    """Makes the mesh of --mesh the current one. Explicit axes: shardings are part of types."""
    wanted = max(1, min(256, math.prod(map(int, re.findall(r'(?<!-)\b\d+', text))) // processes))
    with contextlib.suppress(RuntimeError):   # JAX has begun, with the devices that it has
        jax.config.update('jax_num_cpu_devices', max(wanted, jax.config.jax_num_cpu_devices))
    shape = mesh_shape(text, jax.device_count(), jax.default_backend() == 'cpu' and processes == 1)
    mesh = jax.make_mesh(shape, ('batch', 'model'), (jax.sharding.AxisType.Explicit,) * 2)
    jax.set_mesh(mesh)
    return mesh
def check_sizes(mesh, batch_size, accum_steps, embed_dim, num_heads, feed_forward_dim, **_):
    """Exits unless every size divides by what splits it."""
    batch, model = mesh.devices.shape
    require(128 % model == 0, f'--mesh={batch},{model}: model must be a power of 2, at most 128.')
    for name, size, by, parts in [
            ('--batch_size', batch_size, 'batch axis (x accum_steps)', batch * max(1, accum_steps)),
            ('--embed_dim', embed_dim, '--num_heads', num_heads),
            ('--num_heads', num_heads, 'model axis', model),
            ('--feed_forward_dim', feed_forward_dim, 'model axis', model)]:
        require(size % parts == 0, f'{name}={size} is not divisible by {by}={parts}: use '
                f'{-(-size // parts) * parts}.')
def choose_accum_steps(batch_size, maxlen, mesh):
    """Micro-batches a step, by shapes and mesh alone: a resume must repeat them."""
    # Tokens a device and micro-batch: on 2 CPU cores 8,192 took 1.2 times as long as 2,048.
    most = max(512, 2048 // mesh.size) if jax.default_backend() == 'cpu' else 65536
    B = batch_size // mesh.shape['batch']
    return next(n for n in range(1, B + 1) if B % n == 0 and B // n * maxlen <= max(most, maxlen))

# ---- Train step: the loss never holds all logits (B, T, V), and finds its gradients on the way ---
CHUNK = 512   # tokens, about; from 128 to 2048 made no difference
def token_losses(x_BTD, w_VD, y_BT, vocab_size):
    """Softmax cross-entropy of logits x @ w.T: (losses_BT in nats, gradients of their sum dx, dw).
    Each device of the `model` axis holds some rows of w, as in Megatron-LM (arXiv:1909.08053)."""
    def local(x_BTD, w_VD, y_BT):
        (rows, D), n = w_VD.shape, y_BT.size
        size = min((c for c in range(1, n + 1) if n % c == 0), key=lambda c: abs(c - CHUNK))
        first = jax.lax.axis_index('model') * rows
        real_V = first + jnp.arange(rows) < vocab_size   # the others are padding
        at_BT = jnp.where((y_BT >= first) & (y_BT < first + rows), y_BT - first, rows)   # else out
        kernel_VD = w_VD.astype(x_BTD.dtype)
        def chunk(dw_VD, x_and_at):
            x_CD, at_C = x_and_at
            logits_CV = jnp.where(real_V, jnp.matmul(x_CD, kernel_VD.T, **FLOAT32), -jnp.inf)
            top_C = jax.lax.pmax(logits_CV.max(-1), 'model')
            exp_CV = jnp.exp(logits_CV - top_C[:, None])
            target_CD = kernel_VD.at[at_C].get(mode='fill', fill_value=0)
            target_C = jnp.einsum('cd,cd->c', x_CD, target_CD, **FLOAT32)
            sum_C, target_C = jax.lax.psum((exp_CV.sum(-1), target_C), 'model')
            # d loss / d logits = exp / sum - onehot: two products, so that it is never built.
            exp_CV = exp_CV.astype(x_CD.dtype)
            dx_CD = jax.lax.psum((exp_CV @ kernel_VD) / sum_C[:, None] - target_CD, 'model')
            dw_VD += jnp.matmul(exp_CV.T, (x_CD / sum_C[:, None]).astype(x_CD.dtype), **FLOAT32)
            return dw_VD, (top_C + jnp.log(sum_C) - target_C, dx_CD.astype(x_CD.dtype))
        # varying, a type of shard_map's: each device adds up its own sum, psum joins them below
        zeros = jax.lax.pcast(jnp.zeros(w_VD.shape), ('batch', 'model'), to='varying')
        chunks = x_BTD.reshape(-1, size, D), at_BT.reshape(-1, size)
        dw_VD, (losses, dx) = jax.lax.scan(chunk, zeros, chunks)
        dw_VD = dw_VD.at[at_BT].add(-x_BTD.astype(jnp.float32), mode='drop')
        return losses.reshape(y_BT.shape), dx.reshape(x_BTD.shape), jax.lax.psum(dw_VD, 'batch')
    x, w, y = P('batch', None, None), P('model', None), P('batch', None)
    return jax.shard_map(local, in_specs=(x, w, y), out_specs=(y, x, w))(x_BTD, w_VD, y_BT)

@jax.custom_gradient
def cross_entropy(x_BTD, w_VD, y_BT, vocab_size):
    """The sum of token_losses, nats; its backward pass only scales the gradients found there."""
    losses_BT, *grads = token_losses(x_BTD, w_VD, y_BT, vocab_size)
    return losses_BT.sum(), lambda g: (*((a * g).astype(a.dtype) for a in grads), None, None)
def loss_fn(model, ids_BS, dropout_key=None):
    """Mean loss over the windows, nats a token: each token is predicted from those before it."""
    rngs = None if dropout_key is None else nnx.Rngs(dropout=dropout_key)
    (x_BTD, _), y_BT = model(ids_BS[:, :-1], rngs=rngs), ids_BS[:, 1:]
    return cross_entropy(x_BTD, model.output_layer[...], y_BT, model.vocab_size) / y_BT.size
def create_optimizer(model, peak, warmup_steps, steps, weight_decay, clip_norm):
    """(optimizer, rate): clipped AdamW; rate(step) warms up to peak, then falls to peak / 10."""
    warmup = min(warmup_steps, steps - 1)
    rate = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, steps, peak / 10)
    matrices = lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
    tx = optax.chain(optax.clip_by_global_norm(clip_norm), optax.adamw(
        rate, b2=0.95, weight_decay=weight_decay, mask=matrices))
    return jax.jit(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))(model), rate

@jax.jit(donate_argnums=(0, 1), static_argnums=4)
def train_step(model, optimizer, ids_BS, key, accum_steps):
    """One update; gradients add up in the parameters' split. Returns model, optimizer, metrics."""
    whole, key = gather(model), jax.random.fold_in(key, optimizer.step[...])
    accumulate = lambda total, grad: total + jax.reshard(grad, jax.typeof(total).sharding.spec)
    def add(sums, micro_batch):
        found = jax.value_and_grad(loss_fn)(whole, *micro_batch)
        return jax.tree.map(accumulate, sums, found), None
    ids_BAS = ids_BS.reshape(-1, accum_steps, ids_BS.shape[1], out_sharding=P('batch', None, None))
    micro_batches = ids_BAS.swapaxes(0, 1), jax.random.split(key, accum_steps)
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, model)
    sums, _ = jax.lax.scan(add, zeros, micro_batches)
    loss, grads = jax.tree.map(lambda total: total / accum_steps, sums)
    optimizer.update(model, grads)
    return model, optimizer, {'loss': loss, 'grad_norm': optax.tree.norm(jax.tree.leaves(grads))}
@jax.jit
def eval_step(model, ids_BS):
    """Mean loss of each window: (B,) nats a token, dropout off. Unused gradients cost nothing."""
    model = gather(model)
    x_BTD, _ = model(ids_BS[:, :-1])
    losses_BT, *_ = token_losses(x_BTD, model.output_layer[...], ids_BS[:, 1:], model.vocab_size)
    return jax.reshard(losses_BT.mean(-1), P())

# ---- Reports: numbers are read one step late, so that the device never waits for Python ---------
COLUMNS = ('step', 'loss', 'grad_norm', 'learning_rate', 'tokens_per_s', 'val_loss')
PEAKS = {'H100': 989, 'H200': 989, 'TPU v2': 22.5, 'TPU v4': 275, 'TPU v5 lite': 197, 'TPU v5': 459}
def say(text, end='\n', file=None):
    """Prints, in process 0 alone; a line to be overwritten (end='\\r') only on a terminal."""
    if jax.process_index() == 0 and (end == '\n' or sys.stdout.isatty()):
        with contextlib.suppress(BrokenPipeError):   # of `| tee`, which Ctrl-C ends first
            print(text, end=end, file=file, flush=True)
def peak_flops(mesh):
    """FLOP/s of the mesh: by PEAKS (bfloat16 TFLOP/s) or inf; on CPUs a float32 matmul is timed."""
    kind, n = mesh.devices.flat[0].device_kind, -(-2048 // mesh.size) * mesh.size
    if kind != 'cpu':
        return mesh.size * next((1e12 * PEAKS[name] for name in PEAKS if name in kind), math.inf)
    a, b = jnp.ones((n, n), out_sharding=P(('batch', 'model'))), jnp.ones((n, n))
    return 2 * n**3 / min(timeit.repeat(lambda: (a @ b).block_until_ready(), number=1))
def step_flops(tokens, vocab, num_transformer_blocks, maxlen, embed_dim, feed_forward_dim, **_):
    """FLOPs of a step's matmuls, masked scores included, padding not; backward is twice forward."""
    block = 4 * embed_dim**2 + 2 * embed_dim * feed_forward_dim + 2 * maxlen * embed_dim
    return 6 * tokens * (num_transformer_blocks * block + vocab * embed_dim)

class Report:
    """Log lines, rows of metrics.csv and loss.png, for the steps that are logged or validated."""
    def __init__(self, workdir, start, total, tokens, flops, peak, rate, reference):
        self.path, self.total, self.tokens = workdir / 'metrics.csv', total, tokens
        self.flops, self.peak, self.rate, self.reference = flops, peak, rate, reference
        self.unread, self.clock = (), time.perf_counter()
        self.seconds, self.logged = [], 0   # each step's; how many of them are logged
        rows = self.path.read_text(errors='replace').split('\n') if self.path.exists() else []
        rows = [a for a in rows if re.match(r'\d+(,[^,]*){5}$', a) and int(a.split(',')[0]) < start]
        if jax.process_index() == 0:
            with replacing(self.path) as part:
                part.write_text('\n'.join([','.join(COLUMNS), *rows, '']))
    def add(self, *step_under_way):
        """Reads the step before, logs it if that was asked, and exits if it went wrong."""
        if self.unread:
            step, metrics, val_loss, log = self.unread
            metrics, before, self.clock = jax.device_get(metrics), self.clock, time.perf_counter()
            self.seconds.append(self.clock - before)
            require(np.isfinite(sum(metrics.values())), f'step {step} went wrong and is not saved: '
                    '{loss} loss, {grad_norm} grad. Try a lower --learning_rate.'.format(**metrics))
            if log:
                self.write(step, metrics, val_loss)
        self.unread = step_under_way
    def speed(self, seconds):
        mfu = float(self.flops / seconds / self.peak)   # above 1 if the peak was timed too low
        return f'{self.tokens / seconds / 1e3:.2f}k tok/s' + f' | {mfu:.0%} MFU' * (0 < mfu <= 1)
    def write(self, step, metrics, val_loss):
        """A log line and a row of metrics.csv, not made anew: a workdir that has gone ends it."""
        row, line = dict.fromkeys(COLUMNS, '') | {'step': step}, f'step {step}/{self.total}'
        if metrics:
            seconds, self.logged = np.mean(self.seconds[self.logged:]), len(self.seconds)
            row |= metrics | {'learning_rate': np.float32(self.rate(step)),
                              'tokens_per_s': round(self.tokens / seconds, 1)}
            left = datetime.timedelta(seconds=int((self.total - step) * seconds))
            line += ' | loss {loss:.4f} | grad {grad_norm:.2f} | lr {learning_rate:.1e} | '
            line = line.format(**row) + f'{self.speed(seconds)} | eta {left}'
        if val_loss is not None:
            row['val_loss'] = val_loss
            line += ' | val {:.4f} | {} {:.4f}'.format(val_loss, *self.reference)
        say(line)
        if jax.process_index() == 0:
            with open(self.path, 'a', opener=lambda p, f: os.open(p, f & ~os.O_CREAT)) as file:
                file.write(','.join(map(str, row.values())) + '\n')
            if val_loss is not None:
                self.plot()
    def plot(self):
        step, loss, *_, val_loss = np.genfromtxt(self.path, delimiter=',', skip_header=1, ndmin=2).T
        figure = matplotlib.figure.Figure(figsize=(8, 5), layout='constrained')   # needs no display
        axes = figure.add_subplot(xlabel='step', ylabel='loss (nats a token)', yscale='log')
        axes.plot(step, loss, '0.5', step, val_loss, 'ko', step, 0 * step + self.reference[1], 'k:')
        axes.yaxis.set(major_formatter='{x:g}', minor_formatter='{x:g}')
        axes.legend(['training', 'validation', self.reference[0]])
        with replacing(self.path.with_name('loss.png')) as part:
            figure.savefig(part, dpi=120)

def op_kinds(hlo):
    """{operation: kind} of a compiled program's text, without the loops, which hold the others."""
    parts, kinds = re.split(r'\n(?=%)', hlo), {}
    products = {part.split()[0] for part in parts if re.search(r' (dot|convolution)\(', part)}
    line = r'^ +(?:ROOT )?%(\S+) = .*? (?!while|conditional|call\()([a-z][\w-]*)\((.*)'
    for op, code, rest in re.findall(line, hlo, re.M):
        fusion = re.search(r'calls=(%[\w.-]+)|$', rest)[1]
        matmul = code in ('dot', 'convolution') or fusion in products or '$gemm' in rest
        collective = re.match('all-|reduce-scatter|collective-', code)
        kinds[op] = 'matmul' if matmul else 'collectives' if collective else 'elementwise'
    return kinds
def profile(program, report, num_steps, batch_size):
    """Ends the trace of num_steps train steps and prints what they spent their time on."""
    jax.profiler.stop_trace()
    kinds, seconds = op_kinds(program.as_text()), np.array(report.seconds[-num_steps:])
    path = max(report.path.parent.glob('profile/**/*.xplane.pb'), key=os.path.getmtime)
    events, input_ns = [], 0
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for event in itertools.chain.from_iterable(line.events for line in plane.lines):
            stats = dict(event.stats)
            input_ns += event.duration_ns * (event.name == 'input')
            if stats.get('hlo_module') == 'jit_train_step' and stats.get('hlo_op') in kinds:
                device = plane.name, stats.get('device_ordinal')
                events.append((device, event.start_ns, event.end_ns, stats['hlo_op']))
    ends, op_ns, kind_ns = (collections.Counter() for _ in range(3))
    for device, start, end, op in sorted(events):   # what two threads do at once counts once
        busy_ns, ends[device] = max(0, end - max(start, ends[device])), max(end, ends[device])
        op_ns[op] += busy_ns
        kind_ns[kinds[op]] += busy_ns
    all_ns = max(1e9 * seconds.sum() * len(ends), kind_ns.total())
    kind_ns['input'] = min(all_ns - kind_ns.total(), input_ns * len(ends))
    kind_ns['idle'] = all_ns - kind_ns.total()
    shares = lambda ns: ' | '.join(f'{name} {n / all_ns:.1%}' for name, n in ns)
    low, median, high = np.percentile(seconds * 1e3, (10, 50, 90))
    say(f'\n--- {num_steps} steps traced: {path} ---\n{median:.1f} ms a step (10% below {low:.1f}, '
        f'10% above {high:.1f}), {median / batch_size:.2f} ms an example | '
        f'{report.flops / median / 1e9:.3f} TFLOP/s | {report.speed(median / 1e3)}\n'
        f'{shares(kind_ns.items())}\nlongest: {shares(op_ns.most_common(5))}\n')

# ---- Sampler: the prompt takes one pass, then each token one against the KV cache; compiled once -
@jax.jit(static_argnames='top_k')
def generate_tokens(model, ids_BT, start, stop, key, temperature, end, top_k):
    """ids_BT, filled from `start` on until each row has an `end` after its first id, or `stop`."""
    model = gather(model)
    def write_token(carry):
        index, ids_BT, caches = carry
        last_B1 = jax.lax.dynamic_slice_in_dim(ids_BT, index - 1, 1, axis=1)
        x_B1D, caches = model(last_B1, caches, index - 1)
        logits_BV = jnp.einsum('btd,vd->bv', x_B1D, model.output_layer[...].astype(x_B1D.dtype),
                               **FLOAT32, out_sharding=P('batch', 'model'))
        logits_BV = jax.reshard(logits_BV, P())[:, :model.vocab_size]   # no padded ids
        top_BK, ids_BK = jax.lax.top_k(logits_BV, min(top_k or model.vocab_size, model.vocab_size))
        # argmax(logits + temperature * Gumbel noise) draws from softmax(logits / temperature)
        noise_BK = jax.random.gumbel(jax.random.fold_in(key, index), top_BK.shape)
        best_B1 = jnp.argmax(top_BK + temperature * noise_BK, axis=1, keepdims=True)
        token_B1 = jax.reshard(jnp.take_along_axis(ids_BK, best_B1, axis=1), P('batch', None))
        return index + 1, jax.lax.dynamic_update_slice_in_dim(ids_BT, token_B1, index, 1), caches
    goes_on = lambda carry: (carry[0] < stop) & ~(carry[1][:, 1:] == end).any(axis=1).all()
    _, caches = model(ids_BT)   # of the whole row; what stands behind index is written over
    return jax.reshard(jax.lax.while_loop(goes_on, write_token, (start, ids_BT, caches))[1], P())
def encode_prompt(tokenizer, prompt, maxlen):
    """End-of-text, as before every story of the stream, and the prompt's ids; exits if too long."""
    ids = [tokenizer.eot_token] + tokenizer.encode_ordinary(prompt)
    require(len(ids) < maxlen, f'--prompt has {len(ids) - 1} tokens, maxlen room for {maxlen - 2}.')
    return ids
def generate_text(model, tokenizer, num_samples, prompt, max_new_tokens, top_k, temperature, seed):
    """Yields texts up to an id that is no text, or the limit, less half a character at the cut."""
    maxlen, end, key = model.embedding_layer.maxlen, tokenizer.eot_token, jax.random.key(seed)
    prompt_ids = encode_prompt(tokenizer, prompt, maxlen)
    start, batch = len(prompt_ids), jax.sharding.get_mesh().shape['batch']
    ids_BT = np.zeros((-(-num_samples // batch) * batch, maxlen), np.int32)
    ids_BT[:, :start] = prompt_ids
    stop = min(maxlen, start + (max_new_tokens or maxlen))
    ids_BT = generate_tokens(model, to_devices(ids_BT), start, stop, key, temperature, end, top_k)
    is_text = set(map(tokenizer.encode_single_token, tokenizer.token_byte_values())).__contains__
    for ids in np.asarray(ids_BT)[:num_samples, 1:stop].tolist():
        yield tokenizer.decode(list(itertools.takewhile(is_text, ids))).rstrip('\ufffd')

# ---- Checkpoint: model, optimizer, configuration; data order and keys follow from seed and step --
def open_checkpoints(workdir, keep=1, read_only=False):
    """Orbax manager that saves in the background and keeps the newest checkpoints and the best."""
    val_loss = lambda metrics: metrics['val_loss']
    best = BestN(get_metric_fn=val_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=AnyPreservationPolicy([LatestN(keep), best]), best_fn=val_loss,
        read_only=read_only, cleanup_tmp_directories=not read_only)
    return ocp.CheckpointManager((workdir / 'checkpoints').absolute(), options=options)
def bit_sums(module):
    """Of each array, in turn, the sum of its bits as uint32, wrapped: the same on every mesh."""
    return [int(a.view(jnp.uint32).sum(dtype=jnp.uint32)) for a in jax.tree.leaves(module)]
def save(manager, step, config, val_loss=None, wait=False, **modules):
    """Copies the modules and returns; Orbax writes them to a temporary folder and renames that."""
    items = {name: ocp.args.StandardSave(nnx.state(module)) for name, module in modules.items()}
    sums = {name: bit_sums(module) for name, module in modules.items()}
    try:
        if step in manager.all_steps():   # which could not be read, or it would have been restored
            manager.delete(step)
        args = ocp.args.Composite(config=ocp.args.JsonSave(config | sums), **items)
        metrics = None if val_loss is None else {'val_loss': float(val_loss)}
        manager.save(step, args=args, metrics=metrics, force=True)
        if wait:
            manager.wait_until_finished()
    except Exception as error:   # a full disk, say: it comes as what a writer of Orbax's raised
        sys.exit(f'A save failed; {manager.directory} keeps those before it: {error!r:.300}')
def restore(manager, **modules):
    """(step, configuration) of the newest whole checkpoint, or (0, None); fills the modules."""
    items = {name: ocp.args.StandardRestore(nnx.state(module)) for name, module in modules.items()}
    args = ocp.args.Composite(config=ocp.args.JsonRestore(), **items)
    for step in sorted(manager.all_steps(), reverse=True):
        try:
            found = manager.restore(step, args=args)   # each array right into its sharding
            for name, module in modules.items():
                nnx.update(module, found[name])
                if bit_sums(module) != found['config'][name]:   # Orbax misses flipped bits
                    raise ValueError(f'bits of its {name} have changed')
            return step, found['config']
        except Exception as error:   # each kind of damage has an exception of its own
            manager.reload()
            if step not in manager.all_steps():   # a run that goes on meanwhile has deleted it
                return restore(manager, **modules)
            say(f'{manager.directory}/{step} is damaged: {error!r:.200}', file=sys.stderr)
    require(not manager.all_steps(), f'{manager.directory}: no checkpoint could be read.')
    return 0, None

# ---- Main: checks, set-up, and a loop that reads a step when the next one is under way ----------
SIGNALS = []   # those that came: the loop saves and stops
def on_signal(number, frame):
    SIGNALS.append(number)
    signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        os.write(2, b'stopping; a second time stops at once, unsaved\n')   # print could fail here
    if jax.process_count() > 1:
        os.kill(os.getpid(), signal.SIGTERM)   # which JAX tells the other processes
def lock(path):
    """Keeps others from training in the folder of path until this process ends, or is killed."""
    try:
        fcntl.lockf(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f'{path.parent}: another process trains there. Let it end, or set --workdir.')
def parse_flags(argv):
    """Parses the command line; an error in it is one line and exit status 1."""
    try:
        stray = flags.FLAGS(argv)[1:2]
    except flags.Error as error:
        sys.exit(f'{error}. See --help.')
    except SystemExit:   # from --help, which ends with 1 in absl
        sys.exit(0)
    require(not stray, f'Stray argument {stray}: flags begin with --, as in --mesh=4,2.')
    require('nan' not in map(repr, flags.FLAGS.flag_values_dict().values()), 'No flag may be nan.')
def sample(F):
    """--mode=sample: text to stdout. Model, settings and tokenizer come from the checkpoint."""
    mesh, saved = create_mesh(F.mesh, F.num_processes or 1), glob.glob('runs/*/checkpoints/*[0-9]')
    newest = max(saved, key=os.path.getmtime, default='runs/checkpoints/none')
    run = pathlib.Path(os.path.expanduser(F.workdir or pathlib.Path(newest).parents[1]))
    manager = open_checkpoints(run, read_only=True)
    step, config = restore(manager)
    require(step, f'{run} has no checkpoint to sample from: train first, or set --workdir.')
    tokenizer = load_tokenizer(config['settings']['tokenizer'], config['words'])
    sizes = {name: config['settings'][name] for name in SIZES}
    check_sizes(mesh, mesh.shape['batch'], 1, **sizes)
    encode_prompt(tokenizer, F.prompt, sizes['maxlen'])   # to fail before anything compiles
    model = create_model(0, tokenizer.n_vocab, F.dtype, **sizes)
    say(f'{run}, step {restore(manager, model=model)[0]}', file=sys.stderr)
    say('\n\n'.join(generate_text(model, tokenizer, F.num_samples, **values(F, SAMPLING))))
def resolve_flags(F):
    """Sets the flags that are unset; returns mesh, the text's path (None: grammar) and workdir."""
    data = pathlib.Path(os.path.expanduser('TinyStories-train.txt' if F.data is None else F.data))
    data = data if F.data != 'grammar' and data.is_file() else None
    require(data or F.data in (None, 'grammar'), f'--data={F.data}: no such file.')
    tokenizer, maxlen, rows = ('gpt2', 256, 144) if data else ('words', 64, 4)
    F.tokenizer, F.maxlen = F.tokenizer or tokenizer, F.maxlen or maxlen
    mesh = create_mesh(F.mesh, F.num_processes or 1)
    batch, model = mesh.devices.shape
    F.mesh, F.batch_size = f'{batch},{model}', F.batch_size or -(-rows // batch) * batch
    check_sizes(mesh, F.batch_size, F.accum_steps, F.embed_dim, F.num_heads, F.feed_forward_dim)
    F.accum_steps = F.accum_steps or choose_accum_steps(F.batch_size, F.maxlen, mesh)
    name = (f'{data.stem if data else "grammar"}-{F.num_transformer_blocks}x{F.embed_dim}'
            f'-b{F.batch_size}-s{F.seed}')
    workdir = pathlib.Path(os.path.expanduser(F.workdir or f'runs/{name}'))
    require(not re.search(r'[][*?]', str(workdir.absolute())), f'{workdir}: Orbax cannot '
            'read a checkpoint back below a folder with one of [ ] * ?: set another --workdir.')
    kind = jax.devices()[0].device_kind.replace('cpu', 'simulated cpu' if mesh.size > 1 else 'cpu')
    say(f'{data or "built-in grammar"} -> {workdir} | mesh {F.mesh} of {kind} devices')
    return mesh, data, workdir
def check_resume(workdir, step, old, new):
    """Exits if what must not change has; says what else has. old, new: {setting: value}."""
    changes = {name: f'{name} {old[name]} -> {new[name]}' for name in new if new[name] != old[name]}
    fixed = ', '.join(change for name, change in changes.items() if name not in FREE)
    require(not fixed, f'{workdir} is another run ({fixed}): --workdir=NEW or --overwrite.')
    if changes and step < new['max_steps']:
        say(f'from step {step} on: ' + ', '.join(changes.values()))
def evaluate(F, step, model, held_out, tokenizer):
    """Mean loss on the held-out windows, nats a token; prints it with a story."""
    rows = F.batch_size // F.accum_steps
    # Filled up with the first windows. np.asarray waits: two programs at once could deadlock.
    batches = np.resize(held_out, (-(-len(held_out) // rows), rows, F.maxlen + 1))
    losses = [np.asarray(eval_step(model, to_devices(batch))) for batch in batches]
    loss = np.concatenate(losses)[:len(held_out)].mean()
    require(np.isfinite(loss), f'step {step}: validation {loss}: not saved')
    text, = generate_text(model, tokenizer, 1, **values(F, SAMPLING))
    say(f'\n--- step {step}, validation loss {loss:.4f} ---\n{text}\n')
    return loss

def train(F):
    """--mode=train: sets a run up, or goes on where it stopped; run_loop does the steps."""
    mesh, data, workdir = resolve_flags(F)
    signal.signal(signal.SIGINT, on_signal)
    if jax.process_count() == 1:   # else JAX hears SIGTERM and stops all at one step
        signal.signal(signal.SIGTERM, on_signal)
    words = common_words(stories_of(data)) if F.tokenizer == 'words' else []
    tokenizer = load_tokenizer(F.tokenizer, words)
    (workdir / 'checkpoints').mkdir(parents=True, exist_ok=True)
    ids, digest = load_tokens(data, tokenizer, workdir)
    training, held_out = split_windows(ids, F.maxlen, F.batch_size)
    encode_prompt(tokenizer, F.prompt, F.maxlen)   # to fail before anything compiles
    total = F.max_steps = F.max_steps or len(training) * F.num_epochs // F.batch_size
    config = dict(settings={'data': digest} | values(F, [*FIXED, *FREE]), words=words)
    lock(workdir / f'lock.{jax.process_index()}')
    with open_checkpoints(workdir, F.keep) as manager:   # at the end it waits for the last save
        for step in manager.all_steps() if F.overwrite else ():   # now that all is checked
            manager.delete(step)
        start, saved = restore(manager)   # settings alone: they decide what may be built
        check_resume(workdir, start, (saved or config)['settings'], config['settings'])
        model = create_model(F.seed, tokenizer.n_vocab, F.dtype, **values(F, SIZES))
        optimizer, rate = create_optimizer(
            model, F.learning_rate, F.warmup_steps, total, F.weight_decay, F.clip_norm)
        start, _ = restore(manager, model=model, optimizer=optimizer)
        if start >= total:
            return say(f'{workdir} is finished at step {start}: raise --max_steps, or --overwrite.')
        say(f'{optax.tree.size(model):,} parameters | {len(training):,} windows, {len(held_out)} '
            f'held out | steps {start} to {total} of {F.batch_size} x {F.maxlen} tokens in '
            f'{F.accum_steps} micro-batches\ncompiling')
        floor = ('ln(vocabulary)', math.log(tokenizer.n_vocab)) if data else ('entropy', ENTROPY)
        tokens = F.batch_size * F.maxlen
        flops = step_flops(tokens, tokenizer.n_vocab, **values(F, SIZES))
        report = Report(workdir, start, total, tokens, flops, peak_flops(mesh), rate, floor)
        run_loop(F, start, manager, config, report, model, optimizer, tokenizer, training, held_out)

def run_loop(F, start, manager, config, report, model, optimizer, tokenizer, training, held_out):
    """Steps from start to the last, or to a signal; what is due is done between two of them."""
    clock, key, total = time.perf_counter(), jax.random.key(F.seed), F.max_steps
    ids_BS = to_devices(np.zeros((F.batch_size, F.maxlen + 1), np.int32))
    next_step = train_step.lower(model, optimizer, ids_BS, key, F.accum_steps).compile()
    used = next_step.memory_analysis()
    say(f'compiled in {time.perf_counter() - clock:.1f} s | MB a device: weights and optimizer '
        f'{used.argument_size_in_bytes / 1e6:.1f}, step {used.temp_size_in_bytes / 1e6:.0f}')
    batches = training_batches(training, F.batch_size, F.seed)
    batch_of = jax.profiler.annotate_function(lambda n: to_devices(batches[n]), name='input')
    due = lambda steps: steps and step % steps == 0
    first, last = (start + 5, start + 5 + F.profile_steps) if F.profile_steps else (None, None)
    if F.profile_steps and last > total:
        say(f'no profile: {total - start} steps are left, 5 + {F.profile_steps} are needed')
    for step in range(start, total + 1):
        stop = manager.reached_preemption(step) if jax.process_count() > 1 else bool(SIGNALS)
        done, val_loss = stop or step == total, None
        if done or due(F.eval_every) or due(F.checkpoint_every) or step in (start, first, last):
            report.add()   # exits rather than let a state that has gone wrong be saved
            if step == first and last <= total and jax.process_index() == 0:
                jax.profiler.start_trace(report.path.with_name('profile'))
            if step == last and jax.process_index() == 0:
                profile(next_step, report, F.profile_steps, F.batch_size)
            if step == total or due(F.eval_every) and not stop:
                val_loss = evaluate(F, step, model, held_out, tokenizer)
            if step > start and (done or due(F.checkpoint_every)):
                save(manager, step, config, val_loss, done, model=model, optimizer=optimizer)
            if done:
                break
            report.clock = time.perf_counter()   # a pause is no part of a step
        with jax.profiler.StepTraceAnnotation('train', step_num=step):
            model, optimizer, metrics = next_step(model, optimizer, batch_of(step), key)
        report.add(step, metrics, val_loss, due(F.log_every) or val_loss is not None)
    if step == total:
        report.write(step, {}, val_loss)
    say(f'step {step}: nothing to save' if step == 0 else f'step {step}: saved in '
        f'{report.path.parent}' + '; the same command goes on from there' * (step < total))
    if stop:   # by a signal, here or in another process
        sys.exit(128 + (SIGNALS or [signal.SIGTERM])[0])
def main(argv, F=flags.FLAGS):
    sys.stdout.reconfigure(errors='replace')   # an ASCII terminal shows what it can
    logging.set_verbosity(logging.FATAL)       # what Orbax raises is enough: it logs it as well,
    sys.unraisablehook = lambda _: None        # and its threads print it
    if (F.coordinator, F.num_processes, F.process_id) != (None, None, None):
        try:   # with None, JAX asks the TPU pod or Slurm
            jax.distributed.initialize(None if F.coordinator == 'auto' else F.coordinator,
                                       F.num_processes, F.process_id, shutdown_timeout_seconds=30)
        except Exception as error:
            sys.exit(f'--coordinator={F.coordinator} (HOST:PORT, or auto): {error!r:.200}')
    try:
        (sample if F.mode == 'sample' else train)(F)
    except KeyboardInterrupt:
        sys.exit(130)
    except jax.errors.JaxRuntimeError as error:   # too little memory, say
        sys.exit(f'{str(error).splitlines()[0]:.300}')
    except OSError as error:
        sys.exit(f'{error.filename or "writing the run"}: {error.strerror or error}')
if __name__ == '__main__':
    app.run(main, flags_parser=parse_flags)
