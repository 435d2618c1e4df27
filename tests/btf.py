"""Read the types that a Linux kernel describes itself with: BTF, as in /sys/kernel/btf/vmlinux.

Only what comparing layouts needs: sizes, the offset of every member (through anonymous structs and unions, with dotted
names into named ones), and the values of enums, anonymous ones included. Format: Documentation/bpf/btf.rst.
"""
import struct

MAGIC = 0xEB9F
(INT, PTR, ARRAY, STRUCT, UNION, ENUM, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FUNC_PROTO, VAR, DATASEC, FLOAT,
 DECL_TAG, TYPE_TAG, ENUM64) = range(1, 20)

# Bytes that follow the 12-byte head of a type: fixed, and for each of its vlen entries.
EXTRA = {INT: (4, 0), PTR: (0, 0), ARRAY: (12, 0), STRUCT: (0, 12), UNION: (0, 12), ENUM: (0, 8), FWD: (0, 0),
         TYPEDEF: (0, 0), VOLATILE: (0, 0), CONST: (0, 0), RESTRICT: (0, 0), FUNC: (0, 0), FUNC_PROTO: (0, 8),
         VAR: (4, 0), DATASEC: (0, 12), FLOAT: (0, 0), DECL_TAG: (4, 0), TYPE_TAG: (0, 0), ENUM64: (0, 12)}
ALIASES = (TYPEDEF, VOLATILE, CONST, RESTRICT, TYPE_TAG)


class Error(ValueError):
    """The bytes are no BTF that this reader understands."""


class Member:
    """One member of a struct: its name, offset in bytes, size in bytes; `bits` when it is a bit field."""

    def __init__(self, name, offset, size, bits=0):
        self.name, self.offset, self.size, self.bits = name, offset, size, bits

    def __eq__(self, other):
        return vars(self) == vars(other)

    def __repr__(self):
        return f"<{self.name} at {self.offset}, {self.size} bytes>"


class Btf:
    """The types in a blob of BTF. Type ids count from 1; id 0 is void."""

    def __init__(self, blob, pointer_size=8):
        if len(blob) < 24:
            raise Error("shorter than a BTF header")
        for order in "<", ">":
            magic, version, _, header, type_off, type_len, str_off, str_len = struct.unpack_from(order + "HBBIIIII", blob)
            if magic == MAGIC:
                break
        else:
            raise Error(f"magic {magic:#x} is not {MAGIC:#x}")
        if version != 1:
            raise Error(f"BTF version {version}")
        self._order, self._blob, self._pointer_size = order, blob, pointer_size
        self._strings = header + str_off
        self._end_of_strings = self._strings + str_len
        if self._end_of_strings > len(blob) or header + type_off + type_len > len(blob):
            raise Error("a section ends behind the end")
        self._at = [None]       # where each type starts
        self._ids = {}          # (kind, name) -> ids
        self._enumerators = None
        at, end = header + type_off, header + type_off + type_len
        while at < end:
            name, info, _ = struct.unpack_from(order + "III", blob, at)
            kind, vlen = info >> 24 & 0x1F, info & 0xFFFF
            if kind not in EXTRA:
                raise Error(f"type {len(self._at)} is of kind {kind}")
            if name:
                self._ids.setdefault((kind, self._string(name)), []).append(len(self._at))
            self._at.append(at)
            fixed, each = EXTRA[kind]
            at += 12 + fixed + each * vlen
        if at != end:
            raise Error("the last type ends behind its section")

    @classmethod
    def of_running_kernel(cls, path="/sys/kernel/btf/vmlinux"):
        with open(path, "rb") as file:
            return cls(file.read())

    def __len__(self):
        return len(self._at)

    def _string(self, offset):
        start = self._strings + offset
        return self._blob[start:self._blob.index(b"\0", start, self._end_of_strings)].decode()

    def _head(self, type_id):
        """(kind, vlen, kind_flag, name, size or type id, where its entries start)."""
        name, info, size = struct.unpack_from(self._order + "III", self._blob, self._at[type_id])
        kind = info >> 24 & 0x1F
        return kind, info & 0xFFFF, info >> 31, self._string(name), size, self._at[type_id] + 12 + EXTRA[kind][0]

    def _bare(self, type_id):
        """Follow typedefs and qualifiers."""
        while type_id:
            kind, _, _, _, target, _ = self._head(type_id)
            if kind not in ALIASES:
                break
            type_id = target
        return type_id

    def size_of(self, type_id):
        """Bytes of a type."""
        type_id = self._bare(type_id)
        if not type_id:
            return 0
        kind, _, _, _, size, entries = self._head(type_id)
        if kind == PTR:
            return self._pointer_size
        if kind == ARRAY:
            element, _, count = struct.unpack_from(self._order + "III", self._blob, entries - 12)
            return self.size_of(element) * count
        return size if kind in (INT, STRUCT, UNION, ENUM, ENUM64, FLOAT) else 0

    def find(self, kind, name):
        """The type of this kind and name with the most entries (a forward declaration may share the name), or None."""
        ids = self._ids.get((kind, name), ())
        return max(ids, key=lambda i: self._head(i)[1], default=None)

    def struct_size(self, name):
        """Bytes of struct `name`; KeyError when the kernel has none."""
        type_id = self.find(STRUCT, name)
        if type_id is None:
            raise KeyError(name)
        return self.size_of(type_id)

    def members(self, name, depth=1):
        """{path: Member} of struct `name`: anonymous members are looked through, named ones give `depth` dotted levels."""
        type_id = self.find(STRUCT, name)
        if type_id is None:
            raise KeyError(name)
        found = {}
        self._collect(type_id, "", 0, found, depth)
        return found

    def _collect(self, type_id, prefix, base, found, depth):
        kind, vlen, flag, _, _, at = self._head(type_id)
        for i in range(vlen):
            name_off, member, offset = struct.unpack_from(self._order + "III", self._blob, at + 12 * i)
            # With kind_flag the size of a bit field is in the top byte of the offset, which counts bits.
            bits, offset = (offset >> 24, offset & 0xFFFFFF) if flag else (0, offset)
            name = self._string(name_off)
            start = base + offset // 8
            inner = self._bare(member)
            if name:
                found[prefix + name] = Member(prefix + name, start, self.size_of(member), bits)
            if inner and self._head(inner)[0] in (STRUCT, UNION) and (depth or not name):
                self._collect(inner, prefix + name + "." if name else prefix, start, found, depth - bool(name))

    def _enum_values(self, type_id):
        kind, vlen, signed, _, _, at = self._head(type_id)
        values = {}
        for i in range(vlen):
            if kind == ENUM:
                name, value = struct.unpack_from(self._order + ("Ii" if signed else "II"), self._blob, at + 8 * i)
            else:
                name, low, high = struct.unpack_from(self._order + "III", self._blob, at + 12 * i)
                value = low | high << 32
                if signed and value >> 63:
                    value -= 1 << 64
            values[self._string(name)] = value
        return values

    def enum(self, name):
        """{enumerator: value} of enum `name`; KeyError when the kernel has none."""
        for kind in ENUM, ENUM64:
            type_id = self.find(kind, name)
            if type_id is not None:
                return self._enum_values(type_id)
        raise KeyError(name)

    def enumerators(self, prefix):
        """{enumerator: value} over all enums, anonymous ones too, of names that start with `prefix`."""
        if self._enumerators is None:
            self._enumerators = {}
            for type_id in range(1, len(self._at)):
                kind = struct.unpack_from(self._order + "I", self._blob, self._at[type_id] + 4)[0] >> 24 & 0x1F
                if kind in (ENUM, ENUM64):
                    self._enumerators.update(self._enum_values(type_id))
        return {name: value for name, value in self._enumerators.items() if name.startswith(prefix)}
