"""A copy of a GGUF with a byte tokenizer, so that both servers can be asked in text."""

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tamis.engine.token_text import BYTE_ALPHABET

SPECIALS = ("<pad>", "<s>", "</s>")


def with_byte_tokenizer(source: Path, target: Path) -> Path:
    """Write `source` to `target` with tokens SPECIALS, the 256 bytes, and names for the rest of the vocabulary."""
    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith(("GGUF.", "tokenizer."))}
    architecture = fields.pop("general.architecture").contents()
    writer = GGUFWriter(target, architecture)
    for name, field in fields.items():
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind is GGUFValueType.ARRAY else None)
    _add_tokenizer(writer, int(fields[f"{architecture}.vocab_size"].contents()))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    spelling = {byte: char for char, byte in BYTE_ALPHABET.items()}
    letters = [spelling[byte] for byte in range(256)]
    # llama.cpp wants a merge: two zero bytes, which no prompt has.
    pair = letters[0] * 2
    known = [*SPECIALS, *letters, pair]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*known, *(f"u{place}" for place in range(len(known), vocabulary))])
    writer.add_token_types([3] * len(SPECIALS) + [1] * (vocabulary - len(SPECIALS)))
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])
    for add, place in ((writer.add_pad_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2)):
        add(place)
    writer.add_add_bos_token(False)
