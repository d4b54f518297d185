// Reads PTX and runs it, one instruction after the other; `operations.h` says what each does.
#include "ptx.h"

#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <sstream>

#include "operations.h"

namespace ptx {

struct Kernel {
    std::string name;
    std::vector<Instruction> code;
    size_t registers = 0;
    std::vector<std::pair<uint32_t, uint64_t>> constants;  // registers that hold them
    size_t shared = 0;
    size_t parameter_bytes = 0;  // of the kernel
    size_t parameter_room = 0;   // with those of the functions it calls
    std::map<std::string, std::vector<uint8_t>> globals;
};

size_t static_shared(const Kernel& kernel) { return kernel.shared; }

size_t end_of_body(const std::string& module, size_t open) {
    size_t at = open;
    for (int depth = 1; depth;) {
        at = module.find_first_of("{}", at + 1);
        if (at == module.npos) return module.size();
        depth += module[at] == '{' ? 1 : -1;
    }
    return at;
}

namespace {

const size_t SHARED_ALIGNMENT = 128;
const size_t PARAMETER_ROOM = 8192;

[[noreturn]] void unknown(const std::string& what, const std::string& where) {
    fprintf(stderr, "ptx: %s: %s\n", what.c_str(), where.c_str());
    abort();
}

std::string trim(const std::string& s) {
    size_t from = s.find_first_not_of(" \t\n"), to = s.find_last_not_of(" \t\n");
    return from == s.npos ? "" : s.substr(from, to - from + 1);
}

// Parts of a list, at commas outside of brackets.
std::vector<std::string> split(const std::string& s) {
    std::vector<std::string> parts;
    std::string part;
    int depth = 0;
    for (char c : s) {
        depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
        if (c == ',' && depth == 0)
            parts.push_back(trim(part)), part.clear();
        else
            part += c;
    }
    if (!trim(part).empty()) parts.push_back(trim(part));
    return parts;
}

std::vector<std::string> words(const std::string& s, char separator) {
    std::vector<std::string> all;
    std::stringstream in(s);
    for (std::string w; std::getline(in, w, separator);) all.push_back(w);
    return all;
}

class Reader {
  public:
    Reader(const std::string& module, const std::string& name) : module_(module), kernel_(new Kernel) { kernel_->name = name; }

    std::shared_ptr<const Kernel> read() {
        size_t at = module_.find(".entry " + kernel_->name + "(");
        size_t body = module_.find("\n{", at) + 1, end = end_of_body(module_, body);
        size_t parameter = module_.find("_param_0[", at);
        if (parameter < body) kernel_->parameter_bytes = strtoul(&module_[parameter + 9], nullptr, 10);
        kernel_->parameter_room = kernel_->parameter_bytes;
        symbols_[kernel_->name + "_param_0"] = 0;
        line_ = 1;
        for (size_t i = 0; i < body; i++) line_ += module_[i] == '\n';
        scopes_.emplace_back();
        statements(module_.substr(body + 1, end - body - 1));
        for (auto& jump : jumps_) {
            if (!labels_.count(jump.second)) unknown("no label", jump.second);
            kernel_->code[jump.first].target = labels_[jump.second];
        }
        for (auto& slot : address_of_dynamic_) kernel_->constants.emplace_back(slot, up(kernel_->shared, SHARED_ALIGNMENT));
        if (!address_of_dynamic_.empty()) kernel_->shared = up(kernel_->shared, SHARED_ALIGNMENT);
        if (kernel_->parameter_room > PARAMETER_ROOM) unknown("too many parameters", kernel_->name);
        for (auto& c : constants_) kernel_->constants.emplace_back(c.second, c.first);
        return kernel_;
    }

  private:
    static size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

    void statements(const std::string& text) {
        size_t i = 0;
        while (i < text.size()) {
            char c = text[i];
            if (c == '\n') line_++;
            if (isspace(c)) {
                i++;
            } else if (c == '{') {
                scopes_.emplace_back();
                i++;
            } else if (c == '}') {
                scopes_.pop_back();
                i++;
            } else {
                size_t end = text.find_first_of(";:", i);
                while (end != text.npos && text[end] == ':' && text[end + 1] == ':') end = text.find_first_of(";:", end + 2);
                std::string s = trim(text.substr(i, end - i));
                if (text[end] == ':')
                    labels_[labels_prefix_ + s] = kernel_->code.size();
                else if (s[0] == '.')
                    declaration(s);
                else
                    instruction(s);
                for (size_t k = i; k < end; k++) line_ += text[k] == '\n';
                i = end + 1;
            }
        }
    }

    void declaration(const std::string& s) {
        if (s.compare(0, 5, ".reg ") == 0) {
            size_t type = s.find('.', 4);
            size_t names = s.find_first_of(" \t", type);
            for (const std::string& name : split(s.substr(names))) {
                size_t angle = name.find('<');
                uint32_t n = angle == name.npos ? 1 : strtoul(&name[angle + 1], nullptr, 10);
                if (angle == name.npos)
                    scopes_.back()[name] = kernel_->registers;
                else
                    ranges_[name.substr(0, angle)] = kernel_->registers;
                kernel_->registers += n;
            }
        } else if (s.compare(0, 7, ".shared") == 0) {
            shared(s);
        } else if (s.compare(0, 7, ".param ") == 0) {
            parameter(s);
        } else if (s.compare(0, 7, ".pragma") != 0) {
            unknown("declaration", s);
        }
    }

    // Bytes of the type in a declaration: .align 4 .b8 name
    static size_t width_of(const std::string& s) {
        for (size_t at = s.find('.'); at != s.npos; at = s.find('.', at + 1))
            if (strchr("bufs", s[at + 1]) && isdigit(s[at + 2])) return strtoul(&s[at + 2], nullptr, 10) / 8;
        unknown("type", s);
    }

    // .shared .align 4 .b8 name[128]
    uint64_t shared(const std::string& s) {
        size_t align = strtoul(&s[s.find(".align") + 6], nullptr, 10), bracket = s.find('[');
        size_t name = s.find_last_of(" \t", bracket) + 1;
        kernel_->shared = up(kernel_->shared, align);
        uint64_t at = kernel_->shared;
        symbols_[s.substr(name, bracket == s.npos ? s.npos : bracket - name)] = at;
        kernel_->shared += width_of(s) * (bracket == s.npos ? 1 : strtoul(&s[bracket + 1], nullptr, 10));
        return at;
    }

    // .param .align 8 .b8 name[72] or .param .b32 name: what a function is called with.
    void parameter(const std::string& s) {
        size_t bracket = s.find('['), name = s.find_last_of(" \t", bracket) + 1;
        kernel_->parameter_room = up(kernel_->parameter_room, 16);
        symbols_[s.substr(name, bracket == s.npos ? s.npos : bracket - name)] = kernel_->parameter_room;
        kernel_->parameter_room += bracket == s.npos ? 8 : strtoul(&s[bracket + 1], nullptr, 10);
    }

    // The text of a function's head, and where its body begins.
    std::string head_of(const std::string& name, size_t& body) {
        for (size_t at = module_.find("\n.func"); at != module_.npos; at = module_.find("\n.func", at + 1)) {
            body = module_.find_first_of("{;", at);
            std::string head = module_.substr(at + 6, body - at - 6);
            size_t found = head.find(name);
            if (module_[body] == '{' && found != head.npos && !isalnum(head[found + name.size()]) && head[found + name.size()] != '_') return head;
        }
        unknown("function", name);
    }

    static std::vector<std::string> parameter_names(const std::string& list) {
        std::vector<std::string> names;
        for (const std::string& p : split(list.substr(1, list.size() - 2))) {
            std::string s = p.substr(0, p.find('['));
            names.push_back(s.substr(s.find_last_of(" \t\n") + 1));
        }
        return names;
    }

    // call (result), function, (parameters): the body of the function, its parameters by other names.
    void call(const std::vector<std::string>& parts) {
        size_t function = parts[0][0] == '(' ? 1 : 0, body;
        std::string head = head_of(parts[function], body);
        size_t open = head.find('(', head.find(parts[function]));
        std::vector<std::string> formal = parameter_names(trim(head.substr(open, head.rfind(')') + 1 - open))), given;
        if (parts.size() > function + 1) given = parameter_names(parts[function + 1]);
        if (function) {
            formal.push_back(parameter_names(trim(head.substr(head.find('('), head.find(')') + 1 - head.find('('))))[0]);
            given.push_back(parameter_names(parts[0])[0]);
        }
        for (size_t i = 0; i < given.size(); i++) symbols_[formal[i]] = symbols_[given[i]];
        auto ranges = ranges_;
        auto labels = labels_prefix_;
        int line = line_;
        labels_prefix_ = std::to_string(++calls_) + "/";
        line_ = 1;
        for (size_t i = 0; i < body; i++) line_ += module_[i] == '\n';
        scopes_.emplace_back();
        depth_++;
        statements(module_.substr(body + 1, end_of_body(module_, body) - body - 1));
        depth_--;
        scopes_.pop_back();
        labels_[labels_prefix_ + "end"] = kernel_->code.size();
        line_ = line, ranges_ = ranges, labels_prefix_ = labels;
    }

    uint32_t constant(uint64_t value) {
        auto found = constants_.find(value);
        if (found != constants_.end()) return found->second;
        return constants_[value] = kernel_->registers++;
    }

    // A register, a number, or the address of a variable.
    uint32_t operand(const std::string& s) {
        if (isdigit(s[0]) || s[0] == '-') return constant(number(s));
        for (size_t i = scopes_.size(); i-- > 0;) {
            auto found = scopes_[i].find(s);
            if (found != scopes_[i].end()) return found->second;
        }
        if (s[0] == '%') {
            size_t digits = s.find_last_not_of("0123456789") + 1;
            auto found = ranges_.find(s.substr(0, digits));
            if (found == ranges_.end()) unknown("register", s);
            return found->second + strtoul(&s[digits], nullptr, 10);
        }
        if (symbols_.count(s)) return constant(symbols_[s]);
        return variable(s);
    }

    static uint64_t number(const std::string& s) {
        if (s.compare(0, 2, "0f") == 0 || s.compare(0, 2, "0F") == 0) return strtoul(s.c_str() + 2, nullptr, 16);
        if (s.compare(0, 2, "0d") == 0 || s.compare(0, 2, "0D") == 0) return strtoull(s.c_str() + 2, nullptr, 16);
        return s[0] == '-' ? (uint64_t)strtoll(s.c_str(), nullptr, 0) : strtoull(s.c_str(), nullptr, 0);
    }

    // A variable of the module.
    uint32_t variable(const std::string& name) {
        size_t at = module_.find(" " + name + "[");
        if (at == module_.npos) at = module_.find(" " + name + " =");
        if (at == module_.npos) at = module_.find(" " + name + ";");
        if (at == module_.npos) unknown("symbol", name);
        size_t begin = module_.rfind('\n', at) + 1, end = module_.find(';', at);
        std::string s = module_.substr(begin, end - begin);
        if (s.compare(0, 14, ".extern .share") == 0) {
            address_of_dynamic_.push_back(kernel_->registers);
            scopes_[0][name] = kernel_->registers;
            return kernel_->registers++;
        }
        if (s.compare(0, 7, ".shared") == 0) return constant(shared(s));
        return constant(global(name, s));
    }

    // .global .align 4 .b8 name[8] = {0, 1, ...}
    uint64_t global(const std::string& name, const std::string& s) {
        size_t equals = s.find('='), bracket = s.find('[');
        std::string head = s.substr(0, equals);
        size_t width = width_of(head), n = bracket < equals ? strtoul(&s[bracket + 1], nullptr, 10) : 1;
        std::vector<uint8_t>& bytes = kernel_->globals[name];
        bytes.assign(n * width + 16, 0);
        if (equals != s.npos) {
            std::string values = trim(s.substr(equals + 1));
            if (values[0] == '{') values = values.substr(1, values.size() - 2);
            size_t i = 0;
            for (const std::string& v : split(values)) {
                uint64_t value = number(v);
                memcpy(&bytes[i++ * width], &value, width);
            }
        }
        return (uint64_t)bytes.data();
    }

    // [base + offset]: the register of the base, and the offset.
    void address(const std::string& s, Instruction& i) {
        std::string inside = trim(s.substr(1, s.size() - 2));
        size_t plus = inside.find('+');
        i.offset = plus == inside.npos ? 0 : strtoll(inside.c_str() + plus + 1, nullptr, 0);
        i.address = operand(trim(inside.substr(0, plus)));
    }

    void instruction(std::string s) {
        Instruction i;
        i.line = line_;
        if (s[0] == '@') {
            i.negated = s[1] == '!';
            size_t blank = s.find_first_of(" \t\n");
            i.predicate = operand(s.substr(1 + i.negated, blank - 1 - i.negated));
            s = trim(s.substr(blank));
        }
        size_t blank = s.find_first_of(" \t\n");
        std::string name = s.substr(0, blank);
        std::vector<std::string> operands = blank == s.npos ? std::vector<std::string>() : split(s.substr(blank));
        if (name == "bra" || name == "bra.uni") {
            i.kind = JUMP;
            jumps_.emplace_back(kernel_->code.size(), labels_prefix_ + operands[0]);
        } else if (name == "ret" || name == "exit") {
            i.kind = depth_ && name == "ret" ? JUMP : END;
            if (i.kind == JUMP) jumps_.emplace_back(kernel_->code.size(), labels_prefix_ + "end");
        } else if (name == "call.uni" || name == "call") {
            if (i.predicate != NONE) unknown("call under a predicate", s);
            return call(operands);
        } else if (name == "mov.u32" && operands[1][0] == '%' && operands[1].find('.') != operands[1].npos) {
            i.operands = {operand(operands[0])};
            i.run = special(operands[1]);
        } else {
            for (const std::string& o : operands) {
                if (o[0] == '[') {
                    i.memory_first = i.operands.empty();
                    if (i.addressed)
                        i.second_address = operand(trim(words(o.substr(1, o.size() - 2), '+')[0])), i.second_offset = o.find('+') == o.npos ? 0 : strtoll(&o[o.find('+') + 1], nullptr, 0);
                    else
                        address(o, i);
                    i.addressed = true;
                } else if (o[0] == '{') {
                    i.groups.push_back(i.operands.size());
                    for (const std::string& part : split(o.substr(1, o.size() - 2))) i.operands.push_back(operand(part));
                    i.groups.push_back(i.operands.size());
                } else {
                    for (const std::string& part : words(o, '|')) i.operands.push_back(part == "_" ? kernel_->registers++ : operand(part));
                }
            }
            i.run = operation(words(name, '.'), i);
        }
        if (i.kind == STEP && !i.run) unknown("instruction of " + kernel_->name + ", line " + std::to_string(line_), s);
        kernel_->code.push_back(i);
    }

    const std::string& module_;
    std::shared_ptr<Kernel> kernel_;
    int line_;
    std::vector<std::map<std::string, uint32_t>> scopes_;
    std::map<std::string, uint32_t> ranges_;
    std::map<std::string, uint64_t> symbols_;
    std::map<uint64_t, uint32_t> constants_;
    std::map<std::string, size_t> labels_;
    std::vector<std::pair<size_t, std::string>> jumps_;
    std::vector<uint32_t> address_of_dynamic_;
    std::string labels_prefix_;  // of the call that is read
    int calls_ = 0, depth_ = 0;
};

}  // namespace

std::shared_ptr<const Kernel> read(const std::string& module, const std::string& name) { return Reader(module, name).read(); }

void run(const Kernel& kernel, const void* arguments) {
    static std::vector<uint64_t> pool;
    emulator::Thread& me = *emulator::current;
    dim3 size = blockDim;
    size_t need = kernel.registers * size.x * size.y * size.z;
    if (pool.size() < need) {
        // Threads of this block may be at work in it already, but none of a launch that needs more registers than the last.
        if (me.number != 0 && me.number != size.x * size.y * size.z - 1) emulator::fail("the registers moved");
        pool.resize(need, 0xABABABABABABABAB);
    }
    uint64_t* r = &pool[kernel.registers * me.number];
    for (auto& c : kernel.constants) r[c.first] = c.second;
    alignas(16) uint8_t parameters[PARAMETER_ROOM];
    memcpy(parameters, arguments, kernel.parameter_bytes);
    Machine machine = {r, parameters, kernel.parameter_room, me.block->dynamic, me.block->dynamic_bytes, kernel.name.c_str()};
    const Instruction* code = kernel.code.data();
    for (size_t at = 0;;) {
        const Instruction& i = code[at];
        if (i.predicate != NONE && (bool)(r[i.predicate] & 1) == i.negated) {
            at++;
        } else if (i.kind == STEP) {
            i.run(i, machine);
            at++;
        } else if (i.kind == JUMP) {
            at = i.target;
        } else {
            return;
        }
    }
}

}  // namespace ptx
